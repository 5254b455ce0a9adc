/* tests/support_crowd_text.c - what the chats of the crowd are about.
 *
 * Responsible for: see support_crowd_text.h.
 * Not responsible for: who asks when.
 */
#include "tests/support_crowd_text.h"

#include "engine/needle.h"
#include "tests/testing.h"
#include "tools/licences.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *support_crowd_text_key(uint32_t fact) {
    static const char *const keys[CROWD_FACTS] = {"red lamp", "blue door", "green boat",
                                                  "white gate"};
    return keys[fact % CROWD_FACTS];
}

const char *support_crowd_text_talk(uint64_t number) {
    static const char *const said[] = {"Name one thing that the text allows or forbids.",
                                       "Who is the text written for?",
                                       "What is the text about, in one sentence?",
                                       "Which word stands out in the text?",
                                       "Is the text long or short?",
                                       "What would a lawyer say about it?"};
    return said[number % (sizeof said / sizeof said[0])];
}

/* Seven digits, no two alike: a walk through all of them from a place that the seed says. */
static void make_values(struct crowd *crowd) {
    uint64_t first = crowd->options.seed % 9000000;
    for (uint32_t i = 0; i < crowd->options.chats * CROWD_FACTS; i++) {
        uint64_t value = 1000000 + (first + (uint64_t)(i + 1) * 7393913) % 9000000;
        snprintf(crowd->chats[i / CROWD_FACTS].values[i % CROWD_FACTS], CROWD_VALUE_BYTES,
                 "%" PRIu64, value);
    }
}

/* `text` with `insert` as a paragraph of its own behind the share `depth` of it; owned. */
static char *with_paragraph(const char *text, const char *insert, double depth) {
    size_t bytes = strlen(text), at = (size_t)((double)bytes * depth);
    const char *end = strstr(text + at, "\n\n");
    size_t room = bytes + strlen(insert) + 5;
    char *whole = malloc(room);
    if (whole == NULL)
        return NULL;
    int head = (int)(end != NULL ? (size_t)(end - text) : bytes);
    snprintf(whole, room, "%.*s\n\n%s%s", head, text, insert, text + head);
    return whole;
}

/* The sinks stay for ever as they are, so no fact stands in the first eighth. */
static char *make_document(const struct crowd *crowd, const struct licences *licences,
                           const struct crowd_chat *chat, struct kv_diag *diag) {
    struct needle_form form;
    char *text = NULL, *copy = NULL;
    const struct licences_document document = {
        .index = chat->index,
        .count = crowd->options.chats,
        .bytes = (uint64_t)((double)crowd->options.tokens * crowd->options.bytes_per_token),
        .insert = "",
        .depth = 0};
    if (licences_document(licences, &document, &text, diag) != KV_OK)
        return NULL;
    copy = strdup(text);
    kv_alloc_release(kv_alloc_system(), text);
    for (uint32_t fact = 0; copy != NULL && fact < CROWD_FACTS; fact++) {
        double depth = 0.15 + 0.2 * fact + 0.1 * chat->index / crowd->options.chats;
        char *longer = NULL;
        if (needle_house_form(support_crowd_text_key(fact), chat->values[fact], &form, diag) ==
            KV_OK)
            longer = with_paragraph(copy, form.statement, depth);
        free(copy);
        copy = longer;
    }
    return copy;
}

int support_crowd_text(struct crowd *crowd) {
    struct licences *licences = NULL;
    struct kv_diag diag = {""};
    if (licences_load(kv_alloc_system(), &licences, &diag) != KV_OK)
        return support_crowd_inner_fail(crowd, "%s", diag.text);
    make_values(crowd);
    for (uint32_t i = 0; i < crowd->options.chats; i++) {
        struct crowd_chat *chat = &crowd->chats[i];
        chat->index = i;
        chat->names_itself = i % 2 != 0;
        chat->key = crowd->keys[i / 2 % 2];
        snprintf(chat->own_name, sizeof chat->own_name, "crowd-%02u", i);
        chat->messages = cJSON_CreateArray();
        char *text = make_document(crowd, licences, chat, &diag);
        cJSON *message = cJSON_CreateObject();
        cJSON_AddStringToObject(message, "role", "user");
        cJSON_AddStringToObject(message, "content", text != NULL ? text : "");
        cJSON_AddItemToArray(chat->messages, message);
        if (text == NULL)
            support_crowd_inner_fail(crowd, "document %u: %s", i, diag.text);
        free(text);
    }
    licences_drop(licences);
    return !support_crowd_inner_failed(crowd);
}
