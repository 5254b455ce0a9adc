/* engine/device/device_none.c - a program built without CUDA.
 *
 * Responsible for: saying so when a GPU is asked for.
 * Not responsible for: anything where nvcc was found (device_cuda.c takes this file's place).
 */
#include "engine/device/device.h"

enum kv_err device_cuda_open(const struct device_cuda_settings *settings,
                             struct device **device_out, struct kv_diag *diag) {
    (void)settings;
    (void)device_out;
    return kv_diag_set(diag, KV_ERR_NOT_FOUND,
                       "this program was built without CUDA: build it where nvcc is found, or take "
                       "--device cpu");
}

int device_cuda_built(void) {
    return 0;
}
