/* tools/cmd_audit.c - does any session answer with another one's facts?
 *
 * Responsible for: waking every session of the store, the questions that it is asked, the text and
 * JSON of what was found; names of sessions, never a value.
 * Not responsible for: asking and scoring (engine/needle.c).
 *
 * A store has one owner, whose sessions these are. A value that stands in a session's own text,
 * told there or come with a fork, proves nothing there and is not asked.
 */
#include "tools/cmd.h"
#include "tools/json_text.h"
#include "tools/progress.h"
#include "tools/text.h"

#include "engine/needle.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <string.h>

enum { LEAK_NAMES = 4 };

/* One session's needles that can fail, as its image has them. */
struct member {
    char name[IMAGE_NAME_BYTES_MAX + 1];
    struct image image; /* kept for its needles; the ids are released */
};

struct audit {
    struct cmd *cmd;
    struct service *service;
    void *members; /* struct member [count] */
    size_t capacity, count;
    struct progress progress;
    uint64_t asked;
    cJSON *list;
    enum kv_err first_err; /* of a session that could not be woken or asked */
    struct kv_diag first_diag;
    uint32_t failed, leaks, said_here;
    char first[IMAGE_NAME_BYTES_MAX + 1]; /* session of the first failure or leak */
    int no_memory;
};

/* What one session said. */
struct findings {
    uint32_t own_asked, own_passed;
    uint32_t foreign_asked, foreign_answered; /* facts of others */
    uint32_t said_here;                       /* of those not asked: the own text has the value */
    uint32_t absent_asked, absent_answered;   /* a fact of nobody */
    uint32_t preferred;                       /* same key: the other's value is likelier */
    float margin_least;                       /* of own value over the other's, nats */
    int has_margin;
    const char *thieves[LEAK_NAMES]; /* sessions whose values came */
    uint32_t thief_count;
};

static struct member *member_at(const struct audit *audit, size_t index) {
    return (struct member *)audit->members + index;
}

/* --- the sessions and their facts */

static int on_name(void *context, const struct snapshot_entry *entry) {
    struct audit *audit = context;
    if (!kv_alloc_grow(audit->cmd->alloc, &audit->members, &audit->capacity, audit->count + 1,
                       sizeof(struct member))) {
        audit->no_memory = 1;
        return 0;
    }
    struct member *member = member_at(audit, audit->count++);
    memcpy(member->name, entry->head.name, sizeof member->name);
    image_init(&member->image);
    return 1;
}

static void note_error(struct audit *audit, enum kv_err err, const struct kv_diag *diag) {
    if (audit->first_err != KV_OK)
        return;
    audit->first_err = err;
    audit->first_diag = *diag;
}

static enum kv_err read_images(struct audit *audit, struct kv_diag *diag) {
    struct store *store = service_store(audit->service);
    const struct kv_alloc *alloc = audit->cmd->alloc;
    enum kv_err err = snapshot_list(store, alloc, on_name, audit, diag);
    if (audit->no_memory)
        return kv_diag_set(diag, KV_ERR_NOMEM, "no memory for the names of %zu sessions",
                           audit->count);
    for (size_t i = 0; err == KV_OK && i < audit->count; i++) {
        struct member *member = member_at(audit, i);
        struct kv_diag own = {""};
        enum kv_err read = restore_image(store, alloc, member->name, &member->image, &own);
        if (read != KV_OK) {
            /* In a daemon it may have been removed since the list was made. */
            if (read != KV_ERR_NOT_FOUND || audit->cmd->host == NULL)
                note_error(audit, read, &own);
            image_init(&member->image);
            continue;
        }
        kv_alloc_release(alloc, member->image.ids);
        member->image.ids = NULL;
    }
    return err;
}

/* Nobody's session is touched yet: in a daemon others are at work meanwhile. */
static enum kv_err collect(struct audit *audit, struct kv_diag *diag) {
    engine_away(service_engine(audit->service));
    enum kv_err err = read_images(audit, diag);
    engine_back(service_engine(audit->service));
    return err;
}

/* --- questions */

static const struct image_needle *own_needle(const struct image *image, const char *key) {
    for (uint32_t i = 0; i < image->needle_count; i++)
        if (strcmp(image->needles[i].key, key) == 0)
            return &image->needles[i];
    return NULL;
}

static void add_thief(struct findings *findings, const char *name) {
    for (uint32_t i = 0; i < findings->thief_count; i++)
        if (strcmp(findings->thieves[i], name) == 0)
            return;
    if (findings->thief_count < LEAK_NAMES)
        findings->thieves[findings->thief_count++] = name;
}

static enum kv_err ask_own(struct session *session, struct findings *findings,
                           struct kv_diag *diag) {
    const struct needle_question question = {0};
    uint32_t indices[IMAGE_NEEDLES_MAX], count = 0;
    struct needle_result results[IMAGE_NEEDLES_MAX];
    struct needle_list list = {indices, 0};
    const struct image_needle *needles = transfer_needles(session, &count);
    for (uint32_t i = 0; i < count; i++)
        if (needles[i].kept)
            indices[list.count++] = i;
    enum kv_err err = needle_check_all(session, &list, &question, results, diag);
    for (uint32_t i = 0; err == KV_OK && i < list.count; i++) {
        findings->own_asked += results[i].asked != 0;
        findings->own_passed += results[i].asked && results[i].passed;
    }
    return err;
}

/* The same key here and there: which value is likelier? */
static enum kv_err ask_both(struct session *session, const struct image_needle *own,
                            const struct image_needle *other, struct findings *findings,
                            struct kv_diag *diag) {
    const struct needle_text texts[2] = {{own->key, own->ask, own->answer_prefix, own->expect},
                                         {own->key, own->ask, own->answer_prefix, other->expect}};
    struct needle_result results[2];
    enum kv_err err = needle_ask_all(session, texts, 2, results, diag);
    if (err != KV_OK)
        return err;
    float margin = results[0].logp - results[1].logp;
    if (!findings->has_margin || margin < findings->margin_least)
        findings->margin_least = margin;
    findings->has_margin = 1;
    findings->preferred += !(margin > 0);
    return KV_OK;
}

/* One question about a fact that stands nowhere, in the form that the model answers. */
static enum kv_err ask_absent(struct session *session, const char *value, int *answered_out,
                              struct kv_diag *diag) {
    struct needle_form form;
    struct needle_result result;
    enum kv_err err = needle_house_form("the harbour that nobody named", "0", &form, diag);
    if (err != KV_OK)
        return err;
    const struct needle_text text = {form.key, form.ask, form.answer_prefix, value};
    err = needle_ask(session, &text, &result, diag);
    *answered_out = err == KV_OK && result.passed;
    return err;
}

/* Needle `other` of another session, asked here. */
static enum kv_err ask_foreign(struct session *session, const struct image *image,
                               const struct member *there, const struct image_needle *other,
                               struct findings *findings, struct kv_diag *diag) {
    const struct image_needle *own = own_needle(image, other->key);
    const struct needle_text text = {other->key, other->ask, other->answer_prefix, other->expect};
    struct needle_result result = {0};
    int absent = 0;
    uint32_t preferred = findings->preferred;
    enum kv_err err = KV_OK;
    if (!other->kept)
        return KV_OK;
    if (needle_stands(session, other->expect)) {
        findings->said_here++;
        session_ask_breathe(session);
        return KV_OK;
    }
    if (own != NULL && own->kept)
        err = ask_both(session, own, other, findings, diag);
    else
        err = needle_ask(session, &text, &result, diag);
    if (err != KV_OK)
        return err;
    findings->foreign_asked++;
    findings->foreign_answered += result.passed != 0;
#ifdef BREAK_AUDIT_STILL
    session_ask_end(session);
    (void)engine_breathe(session_engine(session), 0);
    session_ask_begin(session);
#else
    session_ask_breathe(session);
#endif
    err = ask_absent(session, other->expect, &absent, diag);
    findings->absent_asked += err == KV_OK;
    findings->absent_answered += absent != 0;
    if (result.passed || absent || findings->preferred != preferred)
        add_thief(findings, there->name);
    return err;
}

/* In a daemon others step between two questions; this session stays what it is. */
static enum kv_err ask_all(struct audit *audit, size_t here, struct session *session,
                           struct findings *findings, struct kv_diag *diag) {
    const struct image *image = &member_at(audit, here)->image;
    session_ask_begin(session);
    enum kv_err err = ask_own(session, findings, diag);
    for (size_t i = 0; err == KV_OK && i < audit->count; i++) {
        const struct member *there = member_at(audit, i);
        for (uint32_t k = 0; i != here && err == KV_OK && k < there->image.needle_count; k++)
            err = ask_foreign(session, image, there, &there->image.needles[k], findings, diag);
        if (err == KV_OK && cmd_interrupted(audit->cmd))
            err = kv_diag_set(diag, KV_ERR_CANCELLED, "the audit was stopped");
    }
    session_ask_end(session);
    return err;
}

/* --- what is told */

static void tell_json(struct audit *audit, const char *name, const struct findings *findings,
                      enum kv_err err, const struct kv_diag *diag) {
    cJSON *item = cJSON_CreateObject();
    json_text(item, "name", name);
    json_text(item, "result", kv_err_name(err));
    json_text(item, "reason", err == KV_OK ? "" : diag->text);
    cJSON_AddNumberToObject(item, "own_asked", findings->own_asked);
    cJSON_AddNumberToObject(item, "own_passed", findings->own_passed);
    cJSON_AddNumberToObject(item, "foreign_asked", findings->foreign_asked);
    cJSON_AddNumberToObject(item, "foreign_answered", findings->foreign_answered);
    cJSON_AddNumberToObject(item, "said_here", findings->said_here);
    cJSON_AddNumberToObject(item, "absent_asked", findings->absent_asked);
    cJSON_AddNumberToObject(item, "absent_answered", findings->absent_answered);
    cJSON_AddNumberToObject(item, "foreign_preferred", findings->preferred);
    if (findings->has_margin)
        cJSON_AddNumberToObject(item, "margin_least", (double)findings->margin_least);
    else
        cJSON_AddNullToObject(item, "margin_least");
    cJSON *from = cJSON_AddArrayToObject(item, "answered_like");
    for (uint32_t i = 0; i < findings->thief_count; i++) {
        cJSON *thief = cJSON_CreateObject();
        json_text(thief, "name", findings->thieves[i]);
        cJSON_AddItemToArray(from, thief);
    }
    cJSON_AddItemToArray(audit->list, item);
}

static void tell(struct audit *audit, const char *name, const struct findings *findings,
                 enum kv_err err, const struct kv_diag *diag) {
    if (audit->list != NULL) {
        tell_json(audit, name, findings, err, diag);
        return;
    }
    FILE *out = audit->cmd->out;
    text_print_clean(out, name, strlen(name));
    if (err != KV_OK) {
        fprintf(out, ": ");
        text_print_clean(out, diag->text, strlen(diag->text));
        fprintf(out, "\n");
        return;
    }
    fprintf(out,
            ": own %" PRIu32 " of %" PRIu32 ", foreign %" PRIu32 " of %" PRIu32 ", absent %" PRIu32
            " of %" PRIu32,
            findings->own_passed, findings->own_asked, findings->foreign_answered,
            findings->foreign_asked, findings->absent_answered, findings->absent_asked);
    if (findings->has_margin)
        fprintf(out, ", own value ahead by %.2f nats or more", (double)findings->margin_least);
    if (findings->said_here > 0)
        fprintf(out, ", not asked %" PRIu32 " (its own text has the value too)",
                findings->said_here);
    for (uint32_t i = 0; i < findings->thief_count; i++) {
        fprintf(out, "%s", i == 0 ? "; ANSWERS LIKE " : ", ");
        text_print_clean(out, findings->thieves[i], strlen(findings->thieves[i]));
    }
    fprintf(out, "\n");
}

static enum kv_err audit_one(struct audit *audit, size_t index) {
    const struct member *member = member_at(audit, index);
    struct findings findings = {0};
    struct cmd_asked asked;
    struct kv_diag diag = {""};
    enum kv_err err = cmd_ask_begin(audit->cmd, audit->service, member->name, &asked, &diag);
    if (err == KV_OK) {
        err = ask_all(audit, index, asked.session, &findings, &diag);
        cmd_ask_end(audit->cmd, audit->service, &asked);
    }
    /* Removed by somebody since the list was made: there is nothing to be wrong. */
    if (err == KV_ERR_NOT_FOUND && audit->cmd->host != NULL)
        return KV_OK;
    progress_end(&audit->progress);
    tell(audit, member->name, &findings, err, &diag);
    progress_update(&audit->progress, index + 1, audit->count);
    if (err != KV_OK)
        note_error(audit, err, &diag);
    uint32_t leaks = findings.foreign_answered + findings.absent_answered + findings.preferred;
    uint32_t failed = findings.own_asked - findings.own_passed;
    if (leaks + failed > 0 && audit->leaks + audit->failed == 0)
        memcpy(audit->first, member->name, sizeof audit->first);
    audit->leaks += leaks;
    audit->failed += failed;
    audit->said_here += findings.said_here;
    audit->asked += findings.own_asked + findings.foreign_asked + findings.absent_asked;
    return err == KV_ERR_CANCELLED ? err : KV_OK;
}

static enum kv_err verdict(struct audit *audit, struct kv_diag *diag) {
    if (audit->cmd->result != NULL) {
        cJSON_AddNumberToObject(audit->cmd->result, "questions", (double)audit->asked);
        cJSON_AddNumberToObject(audit->cmd->result, "foreign_answers", audit->leaks);
        cJSON_AddNumberToObject(audit->cmd->result, "failed", audit->failed);
        cJSON_AddNumberToObject(audit->cmd->result, "said_here", audit->said_here);
    } else {
        fprintf(audit->cmd->out,
                "%zu sessions, %" PRIu64 " questions: %" PRIu32 " foreign answers, %" PRIu32
                " own needles failed\n",
                audit->count, audit->asked, audit->leaks, audit->failed);
    }
    if (audit->leaks > 0)
        return kv_diag_set(diag, KV_ERR_PROOF,
                           "%" PRIu32 " answers are another session's, the first of session %s: "
                           "keep the store and report it",
                           audit->leaks, audit->first);
    if (audit->failed > 0)
        return kv_diag_set(diag, KV_ERR_PROOF,
                           "%" PRIu32 " kept needles were not answered, the first of session %s; "
                           "`coldplane needle check` says which",
                           audit->failed, audit->first);
    if (audit->first_err != KV_OK)
        return kv_diag_set(diag, audit->first_err, "%s", audit->first_diag.text);
    return KV_OK;
}

enum kv_err cmd_audit(struct cmd *cmd, struct kv_diag *diag) {
    struct audit audit = {.cmd = cmd};
    enum kv_err err = KV_OK;
    cmd_take_signals(cmd);
    KV_TRY(cmd_open_service(cmd, CMD_READ, NULL, NULL, &audit.service, diag));
    KV_TRY(collect(&audit, diag));
    if (cmd->result != NULL)
        audit.list = cJSON_AddArrayToObject(cmd->result, "sessions");
    cmd_progress(cmd, &audit.progress, "auditing", "sessions");
    for (size_t i = 0; i < audit.count && err == KV_OK; i++)
        err = audit_one(&audit, i);
    progress_end(&audit.progress);
    if (err == KV_OK)
        err = verdict(&audit, diag);
    else
        kv_diag_set(diag, err, "%s", audit.first_diag.text);
done:
    for (size_t i = 0; i < audit.count; i++)
        image_release(&member_at(&audit, i)->image, cmd->alloc);
    kv_alloc_release(cmd->alloc, audit.members);
    cmd_close_service(cmd, audit.service);
    return err;
}
