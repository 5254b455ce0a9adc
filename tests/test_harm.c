/* tests/test_harm.c - the fault list of gpu_harm on the processor, and that its checks can fail.
 *
 * Responsible for: every fault in every place is injected and found by whom it must be; nothing is
 * found where nothing was changed; the places and layers all occur.
 * Not responsible for: 8B geometry and a GPU's memory (gpu_harm.c).
 *
 * Fails with BREAK_HARM_INJECT (nothing is written), BREAK_PLANE_DIGEST (a wake compares no
 * digests) and BREAK_HARM_JUDGE (every answer is right).
 */
#include "tests/support_harm.h"
#include "tests/support_harm_faults.h"
#include "tests/support_tally.h"
#include "tests/support_wall.h"
#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

static struct harm harm;
static struct harm_result results[HARM_RESULTS_MAX];

/* Fails with BREAK_HARM_INJECT, BREAK_PLANE_DIGEST and BREAK_HARM_JUDGE. The device's memory is
 * behind a wall: bytes get there through the device's door alone. */
static void every_fault_is_found_by_whom_it_must(void **state) {
    (void)state;
    char dir[TESTING_PATH_BYTES], store[TESTING_PATH_BYTES + 8];
    uint32_t layers = 0, places[HARM_PLACES] = {0}, controls = 0;

    testing_ram_dir(dir);
    snprintf(store, sizeof store, "%s/store", dir);
    const struct harm_settings settings = {.model = "synth:small",
                                           .dir = store,
                                           .device = ENGINE_DEVICE_CPU,
                                           .threads = 1,
                                           .blocks = 8,
                                           .pool_bytes = UINT64_C(64) << 20};
    harm_open(&settings, &harm);
    uint32_t count = harm_run(&harm, results);
    for (uint32_t i = 0; i < count; i++) {
        const struct harm_result *result = &results[i];
        if (!result->good)
            fail_msg("%s, %s: injected %d, caught %x, first: %s", result->fault,
                     harm_place_name(result->place), result->injected, result->caught,
                     result->text);
        layers |= result->caught;
        places[result->place]++;
        controls += result->caught == 0 && strncmp(result->fault, "control", 7) == 0;
        /* What is on the disk is refused, whoever else would have seen it. */
        assert_true(result->place != HARM_DISK || !result->woken);
    }
    harm_close(&harm);
    assert_int_equal(tally_failed(), 0);
    assert_int_equal(controls, 2);
    assert_int_equal(layers, (1u << HARM_LAYERS) - 1);
    assert_true(places[HARM_DISK] >= 18 && places[HARM_RECORDED] >= 22);
    assert_true(places[HARM_PUBLISHED] >= 23);
}

TESTING_MAIN(cmocka_unit_test(every_fault_is_found_by_whom_it_must))
