/* tests/gpu_faults.c - a GPU that fails, that is full, and that copies.
 *
 * Responsible for: a kernel with an illegal address under sessions at work: they fail with DEVICE,
 * everything can be closed, and what was saved wakes in another process bit for bit as if it had
 * never left; memory that is not there as an ordinary error; the rate of slots copied through the
 * device against one large copy; a wake from memory. JSON of what was timed.
 * Not responsible for: devices that fail in a simulated way (test_device.c). Ends with `N passed,
 * N failed`.
 *
 * Usage: gpu_faults MODEL OUT.json [cpu]; `cpu` puts the processor in the GPU's place, to try the
 * program itself, and leaves out what cannot be done to a processor. It starts itself once more as
 * `gpu_faults MODEL lose DIR`.
 */
#include "engine/engine_inner.h"
#include "store/base/bytes.h"
#include "tests/support_gpu.h"
#include "tests/support_tally.h"
#include "tools/service.h"

#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { EVENTS_MAX = 256, FIRST_TOKENS = 1500, MORE_TOKENS = 300, ANSWER_TOKENS = 24 };

extern char **environ;

static const char *model_path;
static enum engine_device the_gpu = ENGINE_DEVICE_CUDA;
static struct engine_event events[EVENTS_MAX];

/* --- sessions */

static struct service *open_service(const char *dir, uint64_t ram_bytes) {
    struct service_settings settings;
    struct service *service = NULL;
    struct kv_diag diag = {""};

    support_gpu_settings(&settings);
    settings.model_path = model_path;
    settings.store_dir = dir;
    settings.program = "gpu_faults";
    settings.device = the_gpu;
    settings.ram_bytes = ram_bytes;
    tally_need(service_open(&settings, &service, &diag), &diag, "service_open");
    return service;
}

static void ask(struct session *session, uint32_t first, uint32_t count) {
    static uint32_t ids[8192];
    struct kv_diag diag = {""};

    for (uint32_t i = 0; i < count; i++)
        ids[i] = 1000 + (first + i) * 7919 % 30000;
    tally_need(session_feed(session, ids, count, IMAGE_USER, &diag), &diag, "session_feed");
    tally_need(session_generate(session, ANSWER_TOKENS, &diag), &diag, "session_generate");
}

static void take_row(void *context, uint64_t position, const float *logits) {
    struct kv_digest_state *state = context;

    (void)position;
    kv_digest_update(state, logits, 49152 * sizeof *logits);
}

/* The digest of all logits of a turn. */
static struct kv_digest say(struct session *session, uint32_t first, uint32_t count) {
    struct engine *engine = session_engine(session);
    struct kv_digest_state state;
    struct kv_diag diag = {""};
    uint32_t event_count = 1;

    kv_digest_init(&state);
    session_observe(session, take_row, &state);
    ask(session, first, count);
    while (event_count) {
        tally_need(engine_step(engine, events, &event_count, &diag), &diag, "engine_step");
        for (uint32_t i = 0; i < event_count; i++)
            if (events[i].kind == ENGINE_FAILED)
                tally_need(events[i].err, &diag, "a step");
    }
    session_observe(session, NULL, NULL);
    return kv_digest_final(&state);
}

static void fall_asleep(struct service *service, struct session *session) {
    struct receipt receipt;
    struct kv_diag diag = {""};

    tally_need(service_sleep(service, session, &receipt, &diag), &diag, "service_sleep");
}

/* --- a lost device */

/* A kernel reads where nothing is: CUDA can do nothing more in this process. */
static void break_device(struct device *device) {
    struct ops_finite args = {.x = (const float *)(uintptr_t)0x10000,
                              .bad = (int32_t *)(uintptr_t)0x10000,
                              .x_stride = 64,
                              .rows = 1,
                              .width = 64,
                              .mark = 0};

    device_finite(device, &args);
}

/* The process that loses its device: says what it saw and ends as any other. */
static int lose(const char *dir) {
    struct service *service = open_service(dir, 0);
    struct session *safe = support_gpu_session(service, "safe"), *talks = NULL, *other = NULL,
                   *none = NULL;
    struct receipt receipt;
    struct kv_diag diag = {""};
    uint32_t count = 1, told = 0;
    uint8_t bytes[64];

    (void)say(safe, 0, FIRST_TOKENS);
    fall_asleep(service, safe);
    talks = support_gpu_session(service, "talks");
    (void)say(talks, 50, 700);
    tally_need(service_save(service, talks, 1, &receipt, &diag), &diag, "service_save");
    other = support_gpu_session(service, "other");
    ask(talks, 3000, 400);
    ask(other, 5000, 300);
    tally_need(engine_step(service_engine(service), events, &count, &diag), &diag, "engine_step");
    struct device *device = service_engine(service)->device;
    break_device(device);
    enum kv_err err = engine_step(service_engine(service), events, &count, &diag);
    for (uint32_t i = 0; i < count; i++)
        told += events[i].kind == ENGINE_FAILED && events[i].err == KV_ERR_DEVICE;
    tally_check(err == KV_ERR_DEVICE && device->lost, "a lost device: the step says so");
    tally_check(told >= 1 && told == count,
                "a lost device: the requests of the step fail with DEVICE");
    tally_check(strstr(diag.text, "what was saved is safe") != NULL, "a lost device: the sentence");
    printf("     %s\n", diag.text);
    err = engine_step(service_engine(service), events, &count, &diag);
    tally_check(err == KV_ERR_DEVICE, "a lost device: later steps fail as well");
    tally_check(service_save(service, talks, 1, &receipt, &diag) != KV_OK,
                "a lost device: nothing is saved");
    tally_check(service_wake(service, "safe", NULL, &none, &receipt, &diag) != KV_OK,
                "a lost device: nothing wakes");
    struct device_copy copy = {bytes, service_engine(service)->slots.pool.slots, sizeof bytes};
    tally_check(device_copy_out(device, DEVICE_OUT, &copy, 1) == KV_ERR_DEVICE,
                "a lost device: no lane copies");
    service_close(service);
    tally_check(1, "a lost device: everything was closed");
    return tally_end();
}

static void test_lost(const char *dir) {
    char *const arguments[] = {"gpu_faults", (char *)model_path, "lose", (char *)dir, NULL};
    struct session *session = NULL;
    struct receipt receipt;
    struct kv_diag diag = {""};
    int status = -1;
    pid_t child;

    fflush(stdout);
    if (posix_spawn(&child, "/proc/self/exe", NULL, NULL, arguments, environ) == 0)
        (void)waitpid(child, &status, 0);
    if (!tally_check(WIFEXITED(status) && WEXITSTATUS(status) == 0,
                     "it ended as any other process"))
        printf("     status %d\n", status);
    struct service *service = open_service(dir, 0);
    tally_need(service_wake(service, "safe", NULL, &session, &receipt, &diag), &diag,
               "service_wake");
    tally_check(receipt.fingerprint == RECEIPT_BITS_EQUAL && receipt.tokens_prefilled == 0 &&
                    receipt.digests_failed == 0 && receipt.digests_checked > 5,
                "another process wakes what was asleep, proven bit for bit");
    struct session *twin = support_gpu_session(service, "twin");
    (void)say(twin, 0, FIRST_TOKENS);
    struct kv_digest a = say(session, 2000, MORE_TOKENS), b = say(twin, 2000, MORE_TOKENS);
    tally_check(kv_digest_equal(&a, &b), "it goes on as one that never left");
    tally_need(service_wake(service, "talks", NULL, &session, &receipt, &diag), &diag,
               "service_wake");
    struct session *again = support_gpu_session(service, "again");
    (void)say(again, 50, 700);
    a = say(session, 3000, 400), b = say(again, 3000, 400);
    tally_check(receipt.fingerprint == RECEIPT_BITS_EQUAL && kv_digest_equal(&a, &b),
                "so does what was saved and at work when the device went");
    service_close(service);
}

/* --- memory that is not there */

static struct engine_settings engine_usual(void) {
    return (struct engine_settings){.alloc = kv_alloc_system(),
                                    .clock = kv_clock_system(),
                                    .device = the_gpu,
                                    .device_memory_bytes = UINT64_MAX,
                                    .graphs = 1,
                                    .simd = ENGINE_SIMD_AUTO,
                                    .threads = 4,
                                    .sessions_max = 8,
                                    .slot_budget_bytes = UINT64_C(64) << 20,
                                    .poison_free_slots = 1,
                                    .shuffle_seed = 3};
}

static struct device *open_device(uint64_t bytes) {
    struct device_host_settings host = {kv_alloc_system(), kv_clock_system(), DEVICE_SIMD_AUTO, 4};
    struct device_cuda_settings cuda = {kv_alloc_system(), kv_clock_system(), 0, bytes, bytes, 1};
    struct device *device = NULL;
    struct kv_diag diag = {""};

    tally_need(the_gpu == ENGINE_DEVICE_CUDA ? device_cuda_open(&cuda, &device, &diag)
                                             : device_host_open(&host, &device, &diag),
               &diag, "device");
    return device;
}

static void test_arena(void) {
    struct device *device = open_device((uint64_t)64 << 20);
    uint8_t from[4096], to[4096] = {0};

    memset(from, 7, sizeof from);
    tally_check(device_get(device, (uint64_t)65 << 20) == NULL, "more than the reservation: NULL");
    uint8_t *at = device_get(device, (uint64_t)32 << 20);
    tally_check(at != NULL && device_get(device, (uint64_t)33 << 20) == NULL,
                "more than is left: NULL");
    struct device_copy in = {at, from, sizeof from}, out = {to, at, sizeof to};
    tally_check(device_copy_in(device, DEVICE_STEP, &in, 1) == KV_OK &&
                    device_copy_out(device, DEVICE_STEP, &out, 1) == KV_OK &&
                    memcmp(from, to, sizeof to) == 0 && !device->lost,
                "and the device goes on");
    device_put(device, at);
    device_close(device);
}

/* Refused with a sentence, and everything is as before. */
static void test_no_room(void) {
    struct engine_settings settings = engine_usual();
    struct engine *engine = NULL;
    struct kv_diag diag = {""};
    uint8_t *model = NULL;
    uint64_t bytes = 0;

    tally_need(service_read_model(model_path, kv_alloc_system(), &model, &bytes, &diag), &diag,
               "model");
    settings.device_memory_bytes = (uint64_t)100 << 20;
    enum kv_err err = engine_open(&settings, model, bytes, &engine, &diag);
    printf("     %s\n", diag.text);
    tally_check((err == KV_ERR_NOMEM || err == KV_ERR_DEVICE) && diag.text[0] != 0,
                "a model that does not fit is refused");
    settings.device_memory_bytes = (uint64_t)1 << 50;
    err = engine_open(&settings, model, bytes, &engine, &diag);
    tally_check(err == KV_OK, "more memory than there is: as much as is needed is reserved");
    if (err == KV_OK)
        engine_close(engine);
    settings.slot_budget_bytes = (uint64_t)1 << 49;
    err = engine_open(&settings, model, bytes, &engine, &diag);
    printf("     %s\n", diag.text);
    tally_check(err == KV_ERR_DEVICE && strstr(diag.text, "give less") != NULL,
                "more slots than the device has: refused, and why");
    settings = engine_usual();
    tally_need(engine_open(&settings, model, bytes, &engine, &diag), &diag, "engine_open");
    kv_alloc_release(kv_alloc_system(), model);
    engine_close(engine);
    tally_check(1, "and then there is one that fits");
}

/* Slots run out under one session; it fails alone. */
static void test_slots(void) {
    struct engine_settings settings = engine_usual();
    struct session_settings make = {
        .name = "large",
        .policy = {.recipe = IMAGE_RECIPE_BF16},
        .sampler = {.temperature = 0, .top_p = 1, .top_k = 1, .seed = 1}};
    struct engine *engine = NULL;
    struct session *large = NULL, *small = NULL;
    struct kv_diag diag = {""};
    uint8_t *model = NULL;
    uint64_t bytes = 0;
    uint32_t count = 1, refused = 0, other = 0, answered = 0;

    tally_need(service_read_model(model_path, kv_alloc_system(), &model, &bytes, &diag), &diag,
               "model");
    tally_need(engine_open(&settings, model, bytes, &engine, &diag), &diag, "engine_open");
    kv_alloc_release(kv_alloc_system(), model);
    tally_need(session_create(engine, &make, &large, &diag), &diag, "session_create");
    make.name = "small";
    tally_need(session_create(engine, &make, &small, &diag), &diag, "session_create");
    ask(large, 0, 6000);
    ask(small, 0, 200);
    while (count) {
        tally_need(engine_step(engine, events, &count, &diag), &diag, "engine_step");
        for (uint32_t i = 0; i < count; i++) {
            refused += events[i].kind == ENGINE_FAILED && events[i].err == KV_ERR_NO_SLOTS &&
                       events[i].session == large;
            other += events[i].kind == ENGINE_FAILED && events[i].session != large;
            answered += events[i].kind == ENGINE_TOKEN && events[i].session == small;
        }
    }
    tally_check(refused == 1, "no slot is left: the session that needs one fails with NO_SLOTS");
    tally_check(other == 0 && answered > 0, "the other one answers");
    engine_close(engine);
}

/* --- copies of slots through the device */

enum { COPIED_SLOTS = 256, SLOT_BYTES = 1 << 20, PER_CALL = 64, ROUNDS = 31 };

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

/* Bytes per second, median: one copy, or slots scattered at random in calls of PER_CALL. */
static double copy_rate(struct device *device, uint8_t *at, uint8_t *host, int inwards, int whole) {
    struct device_copy copies[PER_CALL];
    double took[ROUNDS];

    for (uint32_t round = 0; round < ROUNDS; round++) {
        double begun = tally_seconds();
        for (uint32_t slot = 0; slot < (whole ? 1 : COPIED_SLOTS); slot += PER_CALL) {
            for (uint32_t i = 0; i < PER_CALL; i++) {
                uint8_t *there = at + (size_t)((slot + i) * 89 % COPIED_SLOTS) * SLOT_BYTES;
                uint8_t *here = host + (size_t)(slot + i) * SLOT_BYTES;
                copies[i] = inwards ? (struct device_copy){there, here, SLOT_BYTES}
                                    : (struct device_copy){here, there, SLOT_BYTES};
            }
            if (whole)
                copies[0] = inwards
                                ? (struct device_copy){at, host, (size_t)COPIED_SLOTS * SLOT_BYTES}
                                : (struct device_copy){host, at, (size_t)COPIED_SLOTS * SLOT_BYTES};
            enum kv_err err =
                inwards ? device_copy_in(device, DEVICE_IN, copies, whole ? 1 : PER_CALL)
                        : device_copy_out(device, DEVICE_OUT, copies, whole ? 1 : PER_CALL);
            if (err != KV_OK)
                return 0;
        }
        took[round] = tally_seconds() - begun;
    }
    qsort(took, ROUNDS, sizeof took[0], compare_doubles);
    return (double)COPIED_SLOTS * SLOT_BYTES / took[ROUNDS / 2];
}

static void test_copies(FILE *results) {
    size_t bytes = (size_t)COPIED_SLOTS * SLOT_BYTES;
    struct device *device = open_device((uint64_t)COPIED_SLOTS * SLOT_BYTES + ((uint64_t)32 << 20));
    uint8_t *at = device_get(device, bytes), *host = device_host_get(device, bytes);
    uint8_t *back = device_host_get(device, bytes);
    int same = 1;

    if (!at || !host || !back) {
        tally_check(0, "memory to copy");
        return;
    }
    for (size_t i = 0; i < bytes; i += 8)
        kv_put_u64(host + i, (uint64_t)i * 0x9E3779B97F4A7C15ull);
    double in_whole = copy_rate(device, at, host, 1, 1);
    double in_slots = copy_rate(device, at, host, 1, 0);
    double out_slots = copy_rate(device, at, back, 0, 0);
    same = memcmp(host, back, bytes) == 0;
    double out_whole = copy_rate(device, at, back, 0, 1);
    tally_check(same && in_whole > 0 && out_whole > 0, "slots go there and back unchanged");
    printf("     1 MiB slots in calls of %d: in %.1f GB/s (%.3f of one copy's %.1f), out %.1f "
           "(%.3f of %.1f)\n",
           PER_CALL, in_slots * 1e-9, in_slots / in_whole, in_whole * 1e-9, out_slots * 1e-9,
           out_slots / out_whole, out_whole * 1e-9);
    fprintf(results,
            " \"slot_copies\": {\"in_bytes_per_s\": %.4g, \"in_of_one_copy\": %.4f, "
            "\"out_bytes_per_s\": %.4g, \"out_of_one_copy\": %.4f},\n",
            in_slots, in_slots / in_whole, out_slots, out_slots / out_whole);
    device_host_put(device, host);
    device_host_put(device, back);
    device_put(device, at);
    device_close(device);
}

/* --- a wake from memory against one from the disk */

static void test_memory(const char *dir, FILE *results) {
    struct service *service = open_service(dir, (uint64_t)512 << 20);
    struct session *session = support_gpu_session(service, "kept");
    struct kv_diag diag = {""};
    double kept = 1e9, disk = 1e9;
    struct receipt receipt;
    uint64_t bytes = 0;
    int memory = 1;

    (void)say(session, 0, 6000);
    for (uint32_t round = 0; round < 7; round++) {
        fall_asleep(service, session);
        double begun = tally_seconds();
        tally_need(service_wake(service, "kept", NULL, &session, &receipt, &diag), &diag, "wake");
        kept = tally_seconds() - begun < kept ? tally_seconds() - begun : kept;
        memory &= receipt.door_bytes == 0 && receipt.ram_bytes > 0 &&
                  receipt.fingerprint == RECEIPT_BITS_EQUAL;
        bytes = receipt.ram_bytes;
    }
    for (uint32_t i = 0; i < RECEIPT_STAGE_COUNT; i++)
        printf("     wake from memory, stage %u: %.2f ms\n", i, (double)receipt.stage_ns[i] * 1e-6);
    tally_check(memory, "a wake from memory reads nothing of the disk and is proven bit for bit");
    fall_asleep(service, session);
    service_close(service);
    service = open_service(dir, 0);
    for (uint32_t round = 0; round < 3; round++) {
        double begun = tally_seconds();
        tally_need(service_wake(service, "kept", NULL, &session, &receipt, &diag), &diag, "wake");
        disk = tally_seconds() - begun < disk ? tally_seconds() - begun : disk;
        fall_asleep(service, session);
    }
    service_close(service);
    printf("     wake of 6,000 tokens: from memory %.1f ms (%.1f MB), from the disk %.1f ms\n",
           kept * 1e3, (double)bytes * 1e-6, disk * 1e3);
    fprintf(results,
            " \"wake_of_6000_tokens_ms\": {\"memory\": %.2f, \"disk\": %.2f, \"bytes\": %llu},\n",
            kept * 1e3, disk * 1e3, (unsigned long long)bytes);
}

int main(int argc, char **argv) {
    char dir[2][64];

    if (argc < 3)
        return printf("usage: gpu_faults MODEL OUT.json [cpu]\n"), 2;
    model_path = argv[1];
    if (argc > 3 && strcmp(argv[2], "lose") == 0)
        return lose(argv[3]);
    FILE *results = fopen(argv[2], "w");
    if (argc > 3 && strcmp(argv[3], "cpu") == 0)
        the_gpu = ENGINE_DEVICE_CPU;
    for (int i = 0; i < 2; i++) {
        snprintf(dir[i], sizeof dir[i], "/tmp/gpu_faults_XXXXXX");
        if (!results || !mkdtemp(dir[i]))
            return 2;
    }
    fprintf(results, "{\n");
    if (the_gpu == ENGINE_DEVICE_CUDA) {
        test_lost(dir[0]);
        test_arena();
        test_no_room();
    }
    test_slots();
    test_copies(results);
    test_memory(dir[1], results);
    fprintf(results, " \"passed\": %d, \"failed\": %d}\n", tally_passed(), tally_failed());
    fclose(results);
    return tally_end();
}
