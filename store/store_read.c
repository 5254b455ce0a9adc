/* store/store_read.c - many extents from disk at once.
 *
 * Responsible for: cutting extents into requests, keeping the queue full in the order given,
 * putting the bytes where they belong, and saying of every extent whether it is whole.
 * Not responsible for: unzipping (codec.c) or finding extents.
 *
 * Where there are helpers, much is read: all of it passes through the registered staging, 256 KiB
 * at a time, and is copied on by the reading thread while the next requests are under way. A
 * virtual disk is served by a processor that copies, and the 8 MiB that it copies into again and
 * again take more than memory at large would. Without helpers a raw extent whose pieces are pages
 * goes straight to them, up to 4 MiB at a time, and everything else that is raw through the
 * staging.
 *
 * A compressed extent is put together in memory of its own and unzipped from there. Unzipping and
 * digests go to helpers where the caller wants them, so that they run while later extents are on
 * their way; every result is told on the reading thread.
 *
 * A request costs a virtual disk as much as some 60 KiB. So where there are helpers, extents that
 * follow each other on the disk and are read into memory of their own, or are small, come as one
 * run: the first, its head, asks for all of them. Members of a run that fails are read again one by
 * one, so that damage is said of what is damaged.
 */
#include "store/store_read.h"

#include "store/base/bytes.h"
#include "store/read_help.h"
#include "store/read_place.h"
#include "store/reader.h"
#include "store/store_inner.h"
#include "store/store_ram_inner.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

enum {
    DEPTH = IO_DEPTH_MAX,
    JOB_BYTES_MAX = 4 << 20,
    STAGED_BYTES_MAX = 1 << 18, /* of one by way of the staging */
    RUN_BYTES_MAX = JOB_BYTES_MAX,
    CARRIED_RAW_MAX = 1 << 16,    /* a raw extent up to this may be one of a run, and is copied */
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
    int over;         /* its result was told */
    int again, alone; /* it waits for being read again; and is no member of a run then */
    int placed;       /* 1: raw and page by page into the pieces */
    size_t head;      /* once begun: the one whose requests bring it, itself or one in front */
    uint8_t *packed;  /* of a compressed extent, or one that is carried */
    /* Of a head. */
    uint8_t *run;     /* memory of all its members; NULL: it is alone and needs none */
    uint32_t members; /* itself included */
    uint32_t holders; /* members that need that memory */
    uint64_t bytes;   /* of all members, padded */
    uint64_t asked;   /* of those, given to the queue */
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
    uint64_t off; /* in the padded extent, or the run */
    size_t count;
    uint8_t *staging; /* NULL: straight to its place */
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
    size_t end;  /* what comes before it is asked for now */
    /* Members of runs that have failed, and where to go on behind the one that is read now. */
    uint32_t again;
    int back;
    size_t resume;
    struct job jobs[DEPTH];
    uint32_t in_flight;
    struct read_help help;
    uint32_t helping; /* extents that helpers have */
    struct store_read_stats *stats;
    struct kv_diag *diag; /* of the first failed read in order */
    size_t failed_index;
    int stalled;
};

static uint64_t now_ns(const struct round *round) {
    return kv_clock_now_ns(round->store->options.clock);
}

/* Its part of a run is not needed any more. */
static void let_go(struct round *round, struct flow *flow) {
    struct flow *head = &round->flows[flow->head];
    if (flow->packed == NULL || head->pending != 0)
        return;
    flow->packed = NULL;
    if (--head->holders != 0)
        return;
    reader_packed_put(round->reader, head->run);
    head->run = NULL;
}

/* 1 when a failure is to be told of: the first in order that says why, else that was not read. */
static int is_first(const struct round *round, size_t index, enum kv_err err) {
    size_t before = round->failed_index, now = round->index_base + index;
    const struct store_read *all = round->args.reads - round->index_base;
    int unread = (before == SIZE_MAX ? err : all[before].result) == KV_ERR_CANCELLED;
#ifdef BREAK_READ_UNREAD
    unread = err == KV_ERR_CANCELLED;
#endif
    return unread == (err == KV_ERR_CANCELLED) ? now < before : unread;
}

/* The result of one read: sentence, callback, memory. */
static void finish(struct round *round, size_t index, enum kv_err err, const char *why) {
    struct store_read *read = &round->args.reads[index];
    struct flow *flow = &round->flows[index];
    read->result = err;
    flow->over = 1;
    let_go(round, flow);
    if (err != KV_OK && is_first(round, index, err)) {
        round->failed_index = round->index_base + index;
        read_place_tell(read, flow->error, why, round->diag);
    }
    if (round->args.done != NULL)
        round->args.done(round->args.context, round->index_base + index);
}

/* Unzips and digests one extent; touches nothing but it, its flow and the thread's codec. */
static void look(void *context, size_t index, int thread) {
    struct round *round = context;
    const struct store_read *read = &round->args.reads[index];
    struct flow *flow = &round->flows[index];
    uint64_t begin_ns = now_ns(round);
    if (read->extent->codec != CODEC_RAW) {
        flow->found = read_place_unzip(round->reader->codecs[thread], read, flow->packed);
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
    if (!read_place_digest_holds(read)) {
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

/* Tells the next that a helper is done with; 0: there is none. */
static int take_over_one(struct round *round, int wait) {
    size_t index;
    if (round->help.running == 0 || !read_help_take(&round->help, wait, &index))
        return 0;
    round->helping--;
    settle(round, index);
    return 1;
}

/* All bytes of an extent have arrived, or as many as ever will. */
static void conclude(struct round *round, size_t index) {
    struct store_read *read = &round->args.reads[index];
    struct flow *flow = &round->flows[index];
    if (flow->error > 0) {
        finish(round, index, KV_ERR_IO, "");
        return;
    }
    if (flow->error < 0) {
        finish(round, index, KV_ERR_CORRUPT,
               flow->error == -1 ? "the segment ends before it" : "its padding is not zero");
        return;
    }
    if (flow->packed != NULL && read->extent->codec == CODEC_RAW)
        read_place_scatter(read, 0, flow->packed, (size_t)read->extent->raw_bytes);
    if (round->help.running != 0 && (read->extent->codec != CODEC_RAW || read->verify)) {
        while (!read_help_give(&round->help, index))
            (void)take_over_one(round, 0);
        round->helping++;
        return;
    }
    look(round, index, 0);
    settle(round, index);
}

/* All requests of a head have come back. */
static void conclude_run(struct round *round, size_t index) {
    uint32_t members = round->flows[index].members;
    for (size_t i = index; i < index + members; i++) {
        struct flow *flow = &round->flows[i];
        int alone = members == 1;
#ifdef BREAK_RUN_ALONE
        alone = 1;
#endif
        if (alone || flow->error == 0) {
            conclude(round, i);
            continue;
        }
        flow->error = flow->begun = 0;
        flow->again = flow->alone = 1;
        round->again++;
        let_go(round, flow);
    }
}

/* Begins an extent: its file, its way, its memory. */
static enum kv_err begin(struct round *round, size_t index) {
    struct store_read *read = &round->args.reads[index];
    struct flow *flow = &round->flows[index];
    struct kv_diag diag = {""};
    enum kv_err err = read_place_check(read, &diag);
    if (err == KV_OK)
        err = reader_file(round->store, round->reader, read->extent->segment, &flow->file, &diag);
    if (err == KV_OK && read->extent->codec != CODEC_RAW && flow->packed == NULL)
        err = kv_diag_set(&diag, KV_ERR_CORRUPT, "it says that it has %llu compressed bytes",
                          (unsigned long long)read->extent->stored_bytes);
    flow->placed = err == KV_OK && flow->packed == NULL && read_place_is_pages(read);
    flow->head = index;
    flow->members = 1;
    flow->bytes = fmt_extent_padded(read->extent);
    flow->asked = 0;
    if (err != KV_OK)
        finish(round, index, err, diag.text);
    return err;
}

/* An extent that is kept in memory; 0 when it is to be read. Damage there is not damage on disk. */
static int take_from_ram(struct round *round, size_t index) {
    const struct store_read *read = &round->args.reads[index];
    if (!round->args.ram || read_place_check(read, NULL) != KV_OK ||
        !store_ram_inner_take(round->store, read))
        return 0;
    if (read->verify && !read_place_digest_holds(read)) {
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
    if (flow->packed == NULL) {
        flow->run = reader_packed_get(round->reader, (size_t)fmt_extent_padded(extent));
        flow->packed = flow->run;
        flow->head = index;
        flow->holders = flow->run != NULL;
    }
    return flow->packed != NULL;
}

static int is_carried(const struct store_extent *extent) {
    return fmt_extent_padded(extent) <=
           (extent->codec == CODEC_RAW ? CARRIED_RAW_MAX : RUN_BYTES_MAX);
}

/* 1 when read `index` can come with the one in front of it, which ends a run of `bytes` so far. */
static int goes_along(struct round *round, size_t index, uint64_t bytes) {
    const struct store_read *read = &round->args.reads[index];
    const struct store_extent *extent = read->extent, *before = read[-1].extent;
    const struct flow *flow = &round->flows[index];
    return !flow->over && !flow->alone && is_carried(extent) &&
           extent->segment == before->segment &&
           extent->off == before->off + fmt_extent_padded(before) &&
           bytes + fmt_extent_padded(extent) <= RUN_BYTES_MAX &&
           read_place_check(read, NULL) == KV_OK;
}

static int member_has_room(struct round *round, size_t index) {
    return round->args.room == NULL ||
           round->args.room(round->args.context, round->index_base + index, 0);
}

/* The run's memory, if there is as much; what its head has is part of it. */
static int take_run(struct round *round, struct flow *head, uint64_t bytes) {
    int needed = head->run != NULL;
    reader_packed_put(round->reader, head->run);
    uint8_t *run = reader_packed_get(round->reader, (size_t)bytes);
    int taken = run != NULL;
    if (!taken && needed)
        run = reader_packed_get(round->reader, (size_t)head->bytes);
    head->run = head->packed = run;
    return taken;
}

/* Makes the read that is beginning the head of a run, where others follow it. 0: there is no room
 * for all of them yet, and some is coming; single ones would go on filling the gaps. */
static int gather(struct round *round, size_t index) {
    struct flow *head = &round->flows[index];
    uint64_t bytes = head->bytes;
    size_t end = index + 1;
    int busy = round->in_flight != 0 || round->helping != 0, room = 1;
#ifdef BREAK_RUN
    return 1;
#endif
#ifdef BREAK_RUN_WAIT
    busy = 0;
#endif
    if (!round->args.helper || head->alone || !is_carried(round->args.reads[index].extent))
        return 1;
    while (end < round->end && goes_along(round, end, bytes) &&
           (room = member_has_room(round, end)) && !take_from_ram(round, end))
        bytes += fmt_extent_padded(round->args.reads[end++].extent);
    if (!room && busy)
        return 0;
    if (end == index + 1)
        return 1;
    if (!take_run(round, head, bytes))
        return !busy;
    uint8_t *at = head->run;
    head->bytes = bytes;
    head->placed = 0;
    head->holders = head->members = (uint32_t)(end - index);
    for (size_t i = index; i < end; i++) {
        struct flow *flow = &round->flows[i];
        flow->begun = 1;
        flow->head = index;
        flow->packed = at;
        at += fmt_extent_padded(round->args.reads[i].extent);
    }
    return 1;
}

/* The next request of an extent: how much, and where to. 0 when it goes by way of the staging and
 * that has no room. */
static int plan_job(struct round *round, size_t index, struct job *job,
                    struct io_request *request) {
    const struct store_read *read = &round->args.reads[index];
    struct flow *flow = &round->flows[index];
    uint64_t left = flow->bytes - flow->asked;
    size_t count = left < JOB_BYTES_MAX ? (size_t)left : JOB_BYTES_MAX;
    if (flow->run != NULL && !round->args.helper) {
        request->bytes = flow->run + flow->asked;
    } else if (flow->placed && !round->args.helper &&
               read->pieces[flow->piece].iov_len - flow->piece_off >= STORE_PAGE_BYTES) {
        const struct iovec *piece = &read->pieces[flow->piece];
        uint64_t here = (piece->iov_len - flow->piece_off) & ~(uint64_t)(STORE_PAGE_BYTES - 1);
        count = here < count ? (size_t)here : count;
        request->bytes = (uint8_t *)piece->iov_base + flow->piece_off;
    } else {
        count = count < STAGED_BYTES_MAX ? count : STAGED_BYTES_MAX;
        if (flow->placed && !round->args.helper)
            count = STORE_PAGE_BYTES; /* the last page, which the extent fills in part */
        job->staging = reader_staging_get(round->reader, count);
        if (job->staging == NULL)
            return 0;
        request->bytes = job->staging;
    }
    job->read_index = index;
    job->off = flow->asked;
    job->count = count;
    request->file = flow->file;
    request->buffer = job->staging != NULL ? 0 : IO_BUFFER_NONE;
    request->count = count;
    request->off = read->extent->off + flow->asked;
    return 1;
}

static void advance(struct round *round, const struct job *job) {
    const struct store_read *read = &round->args.reads[job->read_index];
    struct flow *flow = &round->flows[job->read_index];
    flow->asked += job->count;
    flow->pending++;
    if (flow->placed && job->staging == NULL) {
        flow->piece_off += job->count;
        round->stats->placed_bytes += job->count;
        if (flow->piece_off == read->pieces[flow->piece].iov_len) {
            flow->piece++;
            flow->piece_off = 0;
        }
    }
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
    if (index == round->end || round->in_flight == DEPTH)
        return 0;
    struct flow *flow = &round->flows[index];
    if (!flow->over && !flow->begun && !has_room(round, index))
        return 0;
    if (flow->over ||
        (!flow->begun && (take_from_ram(round, index) || begin(round, index) != KV_OK))) {
        round->next++;
        return 1;
    }
    if (!flow->begun && !gather(round, index))
        return 0;
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
    if (error != 0)
        reader_staging_put(round->reader, job.staging, job.count);
    if (error == EAGAIN && round->in_flight != 0)
        return 0;
    if (error != 0) {
        for (size_t i = index; i < index + flow->members; i++)
            round->flows[i].error = error;
        flow->asked = flow->bytes;
    } else {
        round->jobs[slot] = job;
        advance(round, &job);
    }
    if (flow->asked == flow->bytes) {
        round->next += flow->members;
        if (flow->pending == 0)
            conclude_run(round, index);
    }
    return 1;
}

/* What has come back of a member of a run, or of a compressed extent alone. */
static void look_at_part(struct round *round, size_t index, const struct job *job,
                         const struct io_completion *done) {
    const struct store_extent *extent = round->args.reads[index].extent;
    struct flow *flow = &round->flows[index];
    const uint8_t *run = round->flows[flow->head].run;
    uint64_t first = (uint64_t)(flow->packed - run), job_end = job->off + job->count;
    uint64_t from = first > job->off ? first : job->off;
    uint64_t end = first + fmt_extent_padded(extent);
    end = end < job_end ? end : job_end;
    if (from >= end)
        return;
    uint64_t padding = first + extent->stored_bytes;
    padding = padding > from ? padding : from;
    if (done->error != 0)
        flow->error = done->error;
    else if (done->done_bytes < end - job->off)
        flow->error = flow->error == 0 ? -1 : flow->error;
    else if (end > padding && !read_place_zeros(run + padding, (size_t)(end - padding)))
        flow->error = flow->error == 0 ? -2 : flow->error;
}

/* The same of one that is read where it belongs, or by way of the staging. */
static void look_at_raw(struct round *round, size_t index, const struct job *job,
                        const struct io_completion *done) {
    const struct store_read *read = &round->args.reads[index];
    struct flow *flow = &round->flows[index];
    uint64_t end = job->off + job->count, stored_bytes = read->extent->stored_bytes;
    uint64_t valid = stored_bytes > job->off ? stored_bytes - job->off : 0;
    size_t useful = valid < job->count ? (size_t)valid : job->count;
    if (done->error != 0)
        flow->error = done->error;
    else if (done->done_bytes != job->count)
        flow->error = flow->error == 0 ? -1 : flow->error;
    else if (end > stored_bytes && !read_place_zeros(job->staging + useful, job->count - useful))
        flow->error = flow->error == 0 ? -2 : flow->error;
    else if (job->staging != NULL)
        read_place_scatter(read, job->off, job->staging, useful);
}

/* One request has come back. */
static void arrive(struct round *round, const struct io_completion *done) {
    struct job *job = &round->jobs[done->tag];
    assert(done->tag < DEPTH && job->used);
    size_t index = job->read_index;
    struct flow *flow = &round->flows[index];
    if (flow->run != NULL && job->staging != NULL)
        memcpy(flow->run + job->off, job->staging, (size_t)done->done_bytes);
    for (size_t i = index; flow->run != NULL && i < index + flow->members; i++)
        look_at_part(round, i, job, done);
    if (flow->run == NULL)
        look_at_raw(round, index, job, done);
    reader_staging_put(round->reader, job->staging, job->count);
    job->used = 0;
    round->in_flight--;
    flow->pending--;
    if (flow->pending == 0 && flow->asked == flow->bytes)
        conclude_run(round, index);
}

/* Tells what the helper has done, waiting for all of it or not. */
static void take_over(struct round *round, int all) {
    while (take_over_one(round, all))
        ;
}

/* No answer within the deadline: what is in flight is in doubt where it goes straight to its place,
 * since the reader's own memory stays until the store is closed; the rest is not tried. */
static void give_up(struct round *round) {
    round->stalled = 1;
    take_over(round, 1);
    for (uint32_t i = 0; i < DEPTH; i++) {
        const struct job *job = &round->jobs[i];
        if (job->used && job->staging == NULL && round->flows[job->read_index].run == NULL)
            round->args.reads[job->read_index].in_doubt = 1;
    }
    for (size_t i = 0; i < round->args.count; i++) {
        struct flow *flow = &round->flows[i];
        int begun = flow->begun && round->flows[flow->head].asked != 0;
        if (flow->over)
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

/* Nothing is under way. */
static void leave_rest(struct round *round) {
    for (size_t i = 0; i < round->args.count; i++)
        if (!round->flows[i].over)
            finish(round, i, KV_ERR_CANCELLED, "not read");
    round->next = round->end = round->args.count;
    round->again = 0;
    round->back = 0;
}

/* Nothing is under way: 1 when what has failed in a run is to be read now, or the last of that is
 * over and the others go on. Whoever waits for it might make no room before. */
static int go_back(struct round *round) {
    size_t index = 0;
    int goes_on = round->back && round->next == round->end;
    if (goes_on) {
        round->next = round->resume;
        round->end = round->args.count;
        round->back = 0;
    }
#ifdef BREAK_RUN_BACK
    if (round->next != round->args.count)
        return goes_on;
#endif
    if (round->back || round->again == 0)
        return goes_on;
    while (!round->flows[index].again)
        index++;
    round->flows[index].again = 0;
    round->again--;
    round->back = 1;
    round->resume = round->next;
    round->next = index;
    round->end = index + 1;
    return 1;
}

static void run_round(struct round *round) {
    const struct io_door *door = round->store->options.door;
    struct io_completion done[DEPTH];
    round->end = round->args.count;
    for (;;) {
        while (submit_next(round))
            ;
        if (round->in_flight == 0 && go_back(round))
            continue;
        if (round->in_flight == 0 && round->next == round->args.count)
            break;
        if (round->in_flight == 0) { /* all room is taken by what has arrived */
            if (!take_over_one(round, 1) && round->args.room != NULL &&
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
        /* Each is copied on; meanwhile the disk has the next ones. */
        for (uint32_t i = 0; i < taken; i++) {
            arrive(round, &done[i]);
            while (submit_next(round))
                ;
        }
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
