/* store/store_read.c - many extents from disk at once.
 *
 * Responsible for: cutting extents into requests of up to 1 MiB, keeping the queue full in the
 * order given, putting the bytes where they belong, and saying of every extent whether it is
 * whole.
 * Not responsible for: unzipping (codec.c) or finding extents.
 *
 * A raw extent whose pieces are pages goes straight to them. Everything else that is raw passes
 * through registered staging. A compressed one is read whole into memory of its own and unzipped
 * from there. Unzipping and digests go to helpers where the caller wants them, so that they run
 * while later extents are on their way; every result is told on the reading thread.
 */
#include "store/store_read.h"

#include "store/base/bytes.h"
#include "store/read_help.h"
#include "store/reader.h"
#include "store/store_inner.h"
#include "store/store_ram_inner.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

enum {
    DEPTH = IO_DEPTH_MAX,
    STAGING_COUNT = READER_STAGING_COUNT,
    STAGING_BYTES = READER_STAGING_BYTES,
    JOB_BYTES_MAX = 1 << 20,
    FILES_MAX = READER_FILES_MAX, /* a call with more goes in rounds */
    /* Compressed bytes of one call that wait for their unzipping: so much, and so much more for
     * each helper beyond the first. */
    PACKED_BYTES = 24 << 20,
    PACKED_HELPER_BYTES = 6 << 20
};

/* One extent on its way. */
struct flow {
    int file;
    int begun;        /* a submit that found the queue full comes back to it */
    int placed;       /* 1: raw and page by page into the pieces */
    uint8_t *packed;  /* of a compressed extent */
    uint64_t asked;   /* bytes given to the queue, counted on the padded extent */
    uint32_t pending; /* requests in flight */
    uint32_t piece;   /* position of `asked` in the pieces, when placed */
    uint64_t piece_off;
    int error; /* errno, or -1 for an early end of file, -2 for padding that is not zero */
    /* What checking it has found; of the thread that does it until it is over. */
    enum kv_err found;
    const char *why;
    int digested;
    uint64_t unzip_ns, digest_ns;
};

struct job {
    int used;
    size_t read_index;
    uint64_t off; /* in the padded extent */
    size_t count;
    int staging; /* index, -1: straight to its place */
    uint64_t begin_ns;
};

/* One round of one call. */
struct round {
    struct store *store;
    struct reader *reader;
    struct store_read_args args; /* of this round only */
    size_t index_base;           /* of its first read in the caller's list */
    struct flow *flows;
    size_t next; /* first read that is not wholly asked for */
    struct job jobs[DEPTH];
    uint32_t in_flight;
    uint8_t staging_busy[STAGING_COUNT];
    struct read_help help;
    struct store_read_stats *stats;
    struct kv_diag *diag; /* of the first failed read in order */
    size_t failed_index;
    int stalled;
};

static const char *label_of(const struct store_read *read) {
    return read->label != NULL ? read->label : "extent";
}

static enum kv_err check_read(const struct store_read *read, struct kv_diag *diag) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < read->piece_count; i++) {
        if (!kv_add_u64(bytes, read->pieces[i].iov_len, &bytes))
            bytes = UINT64_MAX;
    }
    if (bytes == 0 || bytes != read->extent->raw_bytes || read->extent->codec >= CODEC_COUNT)
        return kv_diag_set(diag, KV_ERR_INVALID, "%s: room for %llu bytes, the extent has %llu",
                           label_of(read), (unsigned long long)bytes,
                           (unsigned long long)read->extent->raw_bytes);
    return KV_OK;
}

static int pieces_are_pages(const struct store_read *read) {
    for (uint32_t i = 0; i < read->piece_count; i++) {
        if ((uintptr_t)read->pieces[i].iov_base % STORE_PAGE_BYTES != 0 ||
            read->pieces[i].iov_len == 0 ||
            (i + 1 < read->piece_count && read->pieces[i].iov_len % STORE_PAGE_BYTES != 0))
            return 0;
    }
    return 1;
}

/* Copies staged bytes of a raw extent to where they belong. */
static void scatter(const struct store_read *read, uint64_t off, const uint8_t *from,
                    size_t count) {
    for (uint32_t i = 0; i < read->piece_count && count != 0; i++) {
        size_t size = read->pieces[i].iov_len;
        if (off >= size) {
            off -= size;
            continue;
        }
        size_t take = size - (size_t)off < count ? size - (size_t)off : count;
        memcpy((uint8_t *)read->pieces[i].iov_base + off, from, take);
        from += take;
        count -= take;
        off = 0;
    }
}

static int all_zero(const uint8_t *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (bytes[i] != 0)
            return 0;
    }
    return 1;
}

static uint64_t now_ns(const struct round *round) {
    return kv_clock_now_ns(round->store->options.clock);
}

/* The result of one read: sentence, callback, memory. */
static void finish(struct round *round, size_t index, enum kv_err err, const char *why) {
    struct store_read *read = &round->args.reads[index];
    const struct store_extent *extent = read->extent;
    struct flow *flow = &round->flows[index];
    read->result = err;
    if (flow->pending == 0) {
        reader_packed_put(round->reader, flow->packed);
        flow->packed = NULL;
    }
    if (err != KV_OK && round->index_base + index < round->failed_index) {
        char name[SEGMENT_NAME_BYTES];
        segment_name(extent->segment, name);
        round->failed_index = round->index_base + index;
        if (flow->error > 0)
            kv_diag_errno(round->diag, err, flow->error, "%s: cannot read seg/%s at %llu",
                          label_of(read), name, (unsigned long long)extent->off);
        else
            kv_diag_set(round->diag, err, "%s: %s (seg/%s at %llu)", label_of(read), why, name,
                        (unsigned long long)extent->off);
    }
    if (round->args.done != NULL)
        round->args.done(round->args.context, round->index_base + index);
}

/* The one piece that all pieces are, lying one behind the other; NULL when they do not. */
static uint8_t *one_piece(const struct store_read *read) {
    for (uint32_t i = 1; i < read->piece_count; i++) {
        if ((uint8_t *)read->pieces[i - 1].iov_base + read->pieces[i - 1].iov_len !=
            (uint8_t *)read->pieces[i].iov_base)
            return NULL;
    }
    return read->pieces[0].iov_base;
}

static enum kv_err unzip(struct codec *codec, const struct store_read *read,
                         const uint8_t *packed) {
    const struct store_extent *extent = read->extent;
    size_t raw_bytes = (size_t)extent->raw_bytes;
    uint8_t *whole = one_piece(read);
    uint8_t *raw = whole;
    enum kv_err err = KV_OK;
    if (whole == NULL)
        err = codec_room(codec, raw_bytes, &raw);
    if (err == KV_OK)
        err = codec_unpack(codec, extent->codec, packed, (size_t)extent->stored_bytes, raw,
                           raw_bytes);
    if (err == KV_OK && whole == NULL)
        scatter(read, 0, raw, raw_bytes);
    return err;
}

static int digest_holds(const struct store_read *read) {
    struct kv_digest_state state;
    kv_digest_init(&state);
    for (uint32_t i = 0; i < read->piece_count; i++)
        kv_digest_update(&state, read->pieces[i].iov_base, read->pieces[i].iov_len);
    struct kv_digest digest = kv_digest_final(&state);
#ifdef BREAK_DIGEST
    return 1;
#endif
    return kv_digest_equal(&digest, &read->extent->digest);
}

/* Unzips and digests one extent; touches nothing but it, its flow and the thread's codec. */
static void look(void *context, size_t index, int thread) {
    struct round *round = context;
    const struct store_read *read = &round->args.reads[index];
    struct flow *flow = &round->flows[index];
    uint64_t begin_ns = now_ns(round);
    if (read->extent->codec != CODEC_RAW) {
        flow->found = unzip(round->reader->codecs[thread], read, flow->packed);
        flow->unzip_ns = now_ns(round) - begin_ns;
        begin_ns += flow->unzip_ns;
        if (flow->found != KV_OK) {
            flow->why =
                flow->found == KV_ERR_CORRUPT ? "its compressed bytes are damaged" : "no memory";
            return;
        }
    }
    if (!read->verify)
        return;
    flow->digested = 1;
    if (!digest_holds(read)) {
        flow->found = KV_ERR_CORRUPT;
        flow->why = "its bytes do not match their digest";
    }
    flow->digest_ns = now_ns(round) - begin_ns;
}

/* What was found becomes the result. */
static void settle(struct round *round, size_t index) {
    const struct store_read *read = &round->args.reads[index];
    struct flow *flow = &round->flows[index];
    int whole = flow->found == KV_OK || flow->digested;
    round->stats->unzip_ns += flow->unzip_ns;
    round->stats->digest_ns += flow->digest_ns;
    round->stats->digests += (uint64_t)flow->digested;
    round->stats->raw_bytes += whole ? read->extent->raw_bytes : 0;
    finish(round, index, flow->found, flow->why);
}

/* All bytes of an extent have arrived, or as many as ever will. */
static void conclude(struct round *round, size_t index) {
    struct store_read *read = &round->args.reads[index];
    struct flow *flow = &round->flows[index];
    size_t over;
    if (flow->error > 0) {
        finish(round, index, KV_ERR_IO, "");
        return;
    }
    if (flow->error < 0) {
        finish(round, index, KV_ERR_CORRUPT,
               flow->error == -1 ? "the segment ends before it" : "its padding is not zero");
        return;
    }
    if (round->help.running != 0 && (read->extent->codec != CODEC_RAW || read->verify)) {
        while (!read_help_give(&round->help, index)) {
            if (read_help_take(&round->help, 0, &over))
                settle(round, over);
        }
        return;
    }
    look(round, index, 0);
    settle(round, index);
}

/* Begins an extent: its file, its way, its memory. */
static enum kv_err begin(struct round *round, size_t index) {
    struct store_read *read = &round->args.reads[index];
    struct flow *flow = &round->flows[index];
    struct kv_diag diag = {""};
    enum kv_err err = check_read(read, &diag);
    if (err == KV_OK)
        err = reader_file(round->store, round->reader, read->extent->segment, &flow->file, &diag);
    if (err == KV_OK && read->extent->codec != CODEC_RAW && flow->packed == NULL)
        err = kv_diag_set(&diag, KV_ERR_CORRUPT, "it says that it has %llu compressed bytes",
                          (unsigned long long)read->extent->stored_bytes);
    flow->placed = err == KV_OK && flow->packed == NULL && pieces_are_pages(read);
    if (err != KV_OK)
        finish(round, index, err, diag.text);
    return err;
}

/* An extent that is kept in memory; 0 when it is to be read. Damage there is not damage on disk. */
static int take_from_ram(struct round *round, size_t index) {
    const struct store_read *read = &round->args.reads[index];
    if (!round->args.ram || check_read(read, NULL) != KV_OK ||
        !store_ram_inner_take(round->store, read))
        return 0;
    if (read->verify && !digest_holds(read)) {
        store_ram_inner_forget(round->store, read->extent);
        return 0;
    }
    round->stats->digests += read->verify;
    round->stats->raw_bytes += read->extent->raw_bytes;
    round->stats->ram_bytes += read->extent->raw_bytes;
    finish(round, index, KV_OK, "");
    return 1;
}

/* Takes what an extent needs before it is begun; 0 while others have it. */
static int has_room(struct round *round, size_t index) {
    const struct store_extent *extent = round->args.reads[index].extent;
    struct flow *flow = &round->flows[index];
    if (round->args.room != NULL &&
        !round->args.room(round->args.context, round->index_base + index, 0))
        return 0;
    if (extent->codec == CODEC_RAW || fmt_extent_padded(extent) > CODEC_BYTES_MAX)
        return 1;
    if (flow->packed == NULL)
        flow->packed = reader_packed_get(round->reader, (size_t)fmt_extent_padded(extent));
    return flow->packed != NULL;
}

/* The next request of an extent: how much, and where to. 0 when it needs a staging buffer and none
 * is free. */
static int plan_job(struct round *round, size_t index, struct job *job,
                    struct io_request *request) {
    const struct store_read *read = &round->args.reads[index];
    struct flow *flow = &round->flows[index];
    uint64_t left = fmt_extent_padded(read->extent) - flow->asked;
    size_t count = left < JOB_BYTES_MAX ? (size_t)left : JOB_BYTES_MAX;
    job->staging = -1;
    if (flow->packed != NULL) {
        request->bytes = flow->packed + flow->asked;
    } else if (flow->placed &&
               read->pieces[flow->piece].iov_len - flow->piece_off >= STORE_PAGE_BYTES) {
        const struct iovec *piece = &read->pieces[flow->piece];
        uint64_t here = (piece->iov_len - flow->piece_off) & ~(uint64_t)(STORE_PAGE_BYTES - 1);
        count = here < count ? (size_t)here : count;
        request->bytes = (uint8_t *)piece->iov_base + flow->piece_off;
    } else {
        int free_index = 0;
        while (free_index < STAGING_COUNT && round->staging_busy[free_index])
            free_index++;
        if (free_index == STAGING_COUNT)
            return 0;
        job->staging = free_index;
        request->bytes = round->reader->staging + (size_t)free_index * STAGING_BYTES;
        count = count < STAGING_BYTES ? count : STAGING_BYTES;
        if (flow->placed)
            count = STORE_PAGE_BYTES; /* the last page, which the extent fills in part */
    }
    job->read_index = index;
    job->off = flow->asked;
    job->count = count;
    request->file = flow->file;
    request->buffer = job->staging >= 0 ? 0 : reader_buffer(round->reader, request->bytes, count);
    round->stats->known_bytes += request->buffer >= IO_BUFFER_LENT ? count : 0;
    request->count = count;
    request->off = read->extent->off + flow->asked;
    return 1;
}

static void advance(struct round *round, const struct job *job) {
    const struct store_read *read = &round->args.reads[job->read_index];
    struct flow *flow = &round->flows[job->read_index];
    flow->asked += job->count;
    flow->pending++;
    if (flow->placed && job->staging < 0) {
        flow->piece_off += job->count;
        round->stats->placed_bytes += job->count;
        if (flow->piece_off == read->pieces[flow->piece].iov_len) {
            flow->piece++;
            flow->piece_off = 0;
        }
    }
    if (job->staging >= 0)
        round->staging_busy[job->staging] = 1;
    round->stats->reads++;
    round->stats->read_bytes += job->count;
    round->in_flight++;
    if (round->in_flight > round->stats->in_flight_max)
        round->stats->in_flight_max = round->in_flight;
}

/* Submits the next request in order. 1: one was submitted or one extent is over, go on. */
static int submit_next(struct round *round) {
    const struct io_door *door = round->store->options.door;
    size_t index = round->next;
    if (index == round->args.count || round->in_flight == DEPTH)
        return 0;
    struct store_read *read = &round->args.reads[index];
    struct flow *flow = &round->flows[index];
    if (!flow->begun && !has_room(round, index))
        return 0;
    if (!flow->begun && (take_from_ram(round, index) || begin(round, index) != KV_OK)) {
        round->next++;
        return 1;
    }
    flow->begun = 1;
    uint32_t slot = 0;
    while (round->jobs[slot].used)
        slot++;
    struct job job = {.used = 1, .begin_ns = now_ns(round)};
    struct io_request request = {.write = 0, .tag = slot};
    if (!plan_job(round, index, &job, &request))
        return 0;
    int error = door->submit(door->context, round->reader->queue, &request);
    round->stats->wait_ns += now_ns(round) - job.begin_ns;
    if (error == EAGAIN && round->in_flight != 0)
        return 0;
    if (error != 0) {
        flow->error = error;
        flow->asked = fmt_extent_padded(read->extent);
    } else {
        round->jobs[slot] = job;
        advance(round, &job);
    }
    if (flow->asked == fmt_extent_padded(read->extent)) {
        round->next++;
        if (flow->pending == 0)
            conclude(round, index);
    }
    return 1;
}

/* One request has come back. */
static void arrive(struct round *round, const struct io_completion *done) {
    struct job *job = &round->jobs[done->tag];
    assert(done->tag < DEPTH && job->used);
    size_t index = job->read_index;
    const struct store_read *read = &round->args.reads[index];
    const struct store_extent *extent = read->extent;
    struct flow *flow = &round->flows[index];
    uint64_t end = job->off + job->count;
    uint64_t valid = extent->stored_bytes > job->off ? extent->stored_bytes - job->off : 0;
    size_t useful = valid < job->count ? (size_t)valid : job->count;
    const uint8_t *at = job->staging >= 0
                            ? round->reader->staging + (size_t)job->staging * STAGING_BYTES
                        : flow->packed != NULL ? flow->packed + job->off
                                               : NULL;
    if (done->error != 0)
        flow->error = done->error;
    else if (done->done_bytes != job->count)
        flow->error = flow->error == 0 ? -1 : flow->error;
    else if (end > extent->stored_bytes && !all_zero(at + useful, job->count - useful))
        flow->error = flow->error == 0 ? -2 : flow->error;
    else if (job->staging >= 0)
        scatter(read, job->off, at, useful);
    if (job->staging >= 0)
        round->staging_busy[job->staging] = 0;
    job->used = 0;
    round->in_flight--;
    flow->pending--;
    if (flow->pending == 0 && flow->asked == fmt_extent_padded(extent))
        conclude(round, index);
}

/* Tells what the helper has done, waiting for all of it or not. */
static void take_over(struct round *round, int all) {
    size_t index;
    while (round->help.running != 0 && read_help_take(&round->help, all, &index))
        settle(round, index);
}

/* No answer within the deadline: what is in flight is in doubt, the rest is not tried. */
static void give_up(struct round *round) {
    round->stalled = 1;
    take_over(round, 1);
    for (uint32_t i = 0; i < DEPTH; i++) {
        if (round->jobs[i].used)
            round->args.reads[round->jobs[i].read_index].in_doubt = 1;
    }
    for (size_t i = 0; i < round->args.count; i++) {
        struct flow *flow = &round->flows[i];
        int begun = flow->asked != 0;
        int over = i < round->next && flow->pending == 0;
        if (over)
            continue;
        flow->error = 0;
        finish(round, i, KV_ERR_IO, begun ? "timed out" : "not read, an earlier read timed out");
    }
}

static uint64_t time_left(const struct round *round) {
    uint64_t oldest = UINT64_MAX;
    uint64_t now = now_ns(round);
    for (uint32_t i = 0; i < DEPTH; i++) {
        if (round->jobs[i].used && round->jobs[i].begin_ns < oldest)
            oldest = round->jobs[i].begin_ns;
    }
    uint64_t spent = now > oldest ? now - oldest : 0;
    uint64_t deadline = round->store->options.deadline_ns;
    return spent < deadline ? deadline - spent : 0;
}

static void leave_rest(struct round *round) {
    while (round->next < round->args.count)
        finish(round, round->next++, KV_ERR_CANCELLED, "not read");
}

static void run_round(struct round *round) {
    const struct io_door *door = round->store->options.door;
    struct io_completion done[DEPTH];
    for (;;) {
        while (submit_next(round))
            ;
        if (round->in_flight == 0 && round->next == round->args.count)
            break;
        if (round->in_flight == 0) { /* all room is taken by what has arrived */
            size_t over;
            if (round->help.running != 0 && read_help_take(&round->help, 1, &over))
                settle(round, over);
            else if (round->args.room != NULL &&
                     !round->args.room(round->args.context, round->index_base + round->next, 1))
                leave_rest(round);
            continue;
        }
        uint32_t taken = 0;
        uint64_t begin_ns = now_ns(round);
        int error =
            door->wait(door->context, round->reader->queue, time_left(round), done, DEPTH, &taken);
        round->stats->wait_ns += now_ns(round) - begin_ns;
        if (error != 0) {
            give_up(round);
            return;
        }
        for (uint32_t i = 0; i < taken; i++)
            arrive(round, &done[i]);
        take_over(round, 0);
    }
    take_over(round, 1);
}

/* As many reads as use at most FILES_MAX segments. */
static size_t round_length(const struct store_read_args *args, size_t first) {
    uint32_t numbers[FILES_MAX];
    uint32_t count = 0;
    for (size_t i = first; i < args->count; i++) {
        uint32_t number = args->reads[i].extent->segment;
        uint32_t at = count;
        while (at-- > 0 && numbers[at] != number)
            ;
        if (at != UINT32_MAX)
            continue;
        if (count == FILES_MAX)
            return i - first;
        numbers[count++] = number;
    }
    return args->count - first;
}

/* Memory for what is compressed: all of it, or as much as may wait at once. */
static enum kv_err make_room(struct round *round) {
    const uint64_t unit = (uint64_t)1 << 20;
    uint32_t helpers = round->args.helper ? round->store->options.helpers : 0;
    uint64_t most = 0, sum = 0;
    uint64_t limit = PACKED_BYTES + (helpers > 1 ? helpers - 1 : 0) * (uint64_t)PACKED_HELPER_BYTES;
    for (size_t i = 0; i < round->args.count; i++) {
        const struct store_extent *extent = round->args.reads[i].extent;
        uint64_t bytes = extent->codec == CODEC_RAW ? 0 : fmt_extent_padded(extent);
        if (bytes > CODEC_BYTES_MAX)
            continue;
        most = bytes > most ? bytes : most;
        sum = sum + bytes < limit ? sum + bytes : limit;
    }
#ifdef BREAK_PACKED_ROOM
    sum = (uint64_t)64 << 20;
#endif
    most = kv_round_up(sum > most ? sum : most, unit);
    enum kv_err err = reader_packed(round->store, round->reader, (size_t)most);
    return err == KV_OK ? KV_OK
                        : kv_diag_set(round->diag, err, "no memory for %llu compressed bytes",
                                      (unsigned long long)most);
}

/* All memory that any thread will want is taken here, so that allocations stay in one order;
 * without it, or without threads, the reading thread does everything. */
static void start_helpers(struct round *round) {
    size_t packed = 0, shuffled = 0, apart = 0, work = 0;
    for (size_t i = 0; i < round->args.count; i++) {
        const struct store_read *read = &round->args.reads[i];
        const struct store_extent *extent = read->extent;
        size_t size = extent->raw_bytes <= CODEC_BYTES_MAX ? (size_t)extent->raw_bytes : 0;
        packed += extent->codec != CODEC_RAW;
        work += extent->codec != CODEC_RAW || read->verify;
        if (extent->codec == CODEC_SHUFFLE_ZSTD && size > shuffled)
            shuffled = size;
        if (extent->codec != CODEC_RAW && read->piece_count > 1 && size > apart)
            apart = size;
    }
    if (work < 2)
        return;
    uint32_t threads = round->store->options.helpers;
    threads = threads == 0 ? 1 : threads;
    threads = threads < READ_HELP_THREADS_MAX ? threads : READ_HELP_THREADS_MAX;
    threads = threads < work ? threads : (uint32_t)work;
    if (packed != 0 &&
        reader_codecs(round->store, round->reader, threads + 1, shuffled, apart) != KV_OK)
        return;
    threads = read_help_start(&round->help, threads, look, round);
    if (threads > round->stats->helpers)
        round->stats->helpers = threads;
}

/* One round; *failed_index and the diag follow the first failed read. */
static enum kv_err read_round(struct store *store, const struct store_read_args *args,
                              struct round *round) {
    const struct io_door *door = store->options.door;
    const struct kv_alloc *alloc = store->options.alloc;
    round->store = store;
    round->flows = kv_alloc_zeroed(alloc, args->count, sizeof *round->flows);
    if (round->flows == NULL)
        return kv_diag_set(round->diag, KV_ERR_NOMEM, "no memory for %zu reads", args->count);
    enum kv_err err = reader_take(store, &round->reader, round->diag);
    if (err == KV_OK && (err = make_room(round)) != KV_OK)
        reader_give(store, round->reader, 0);
    if (err == KV_OK) {
        reader_lend(store, round->reader, &args->landing);
        round->stats->door_name = door->queue_name(door->context, round->reader->queue);
        if (args->helper)
            start_helpers(round);
        run_round(round);
        read_help_stop(&round->help);
#ifndef BREAK_CLOSE_UNDER_READ
        if (!round->stalled)
#endif
            reader_close_files(store, round->reader);
        round->stats->direct &= round->reader->direct;
        reader_give(store, round->reader, round->stalled);
    }
    kv_alloc_release(alloc, round->flows);
    return err;
}

enum kv_err store_read(struct store *store, const struct store_read_args *args,
                       struct store_read_stats *stats_out, struct kv_diag *diag) {
    struct store_read_stats stats = {.direct = 1, .door_name = store->door_name};
    enum kv_err err = KV_OK;
    size_t failed_index = SIZE_MAX;
    size_t first = 0;
    for (size_t i = 0; i < args->count; i++) {
        args->reads[i].result = KV_ERR_CANCELLED;
        args->reads[i].in_doubt = 0;
    }
    while (first < args->count && err == KV_OK) {
        size_t length = round_length(args, first);
        struct round *round = kv_alloc_zeroed(store->options.alloc, 1, sizeof *round);
        if (round == NULL) {
            err = kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a round of reads");
            break;
        }
        round->args = *args;
        round->args.reads += first;
        round->args.count = length;
        round->index_base = first;
        round->stats = &stats;
        round->diag = diag;
        round->failed_index = failed_index;
        err = read_round(store, &round->args, round);
        failed_index = round->failed_index;
        kv_alloc_release(store->options.alloc, round);
        first += length;
    }
    if (stats.reads == 0)
        stats.direct = 0; /* nothing was opened that could prove it */
    if (stats_out != NULL)
        *stats_out = stats;
    if (err == KV_OK && failed_index != SIZE_MAX)
        err = args->reads[failed_index].result;
    return err;
}

enum kv_err store_read_whole(struct store *store, const struct store_read_whole *args,
                             uint8_t **bytes_out, struct kv_diag *diag) {
    const uint64_t size = args->extent->raw_bytes;
    uint8_t *bytes = kv_alloc_aligned(args->alloc, size, STORE_PAGE_BYTES);
    if (bytes == NULL)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for a %s of %llu bytes", args->label,
                           (unsigned long long)size);
    const struct iovec piece = {bytes, size};
    struct store_read read = {.extent = args->extent,
                              .pieces = &piece,
                              .piece_count = 1,
                              .verify = 1,
                              .label = args->label};
    const struct store_read_args one = {.reads = &read, .count = 1, .ram = args->ram};
    enum kv_err err = store_read(store, &one, args->stats, diag);
    if (err == KV_OK)
        *bytes_out = bytes;
    else if (!read.in_doubt)
        kv_alloc_release(args->alloc, bytes);
    return err;
}
