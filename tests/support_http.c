/* tests/support_http.c - the HTTP side over a fake service, and a client that speaks HTTP.
 *
 * Responsible for: see support_http.h.
 * Not responsible for: the fake (support_http_serve.c).
 */
#include "tests/support_http.h"

#include "tests/support_http_picture.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ANSWER_MS_MAX = 30000, REQUEST_BYTES = 1 << 16 };

static void hear(void *context, const char *request_id, int status, const char *said) {
    struct http_world *world = context;
    (void)request_id;
    /* Several threads: only ever read by tests with one request at a time. */
    pthread_mutex_lock(&world->serve.lock);
    snprintf(world->refusal, sizeof world->refusal, "%d %s", status, said);
    pthread_mutex_unlock(&world->serve.lock);
}

void support_http_fill(struct http_world *world) {
    world->keys[0] = (struct http_key){HTTP_KEY_A, {1}};
    world->keys[1] = (struct http_key){HTTP_KEY_B, {2}};
    world->options = (struct http_options){
        .serve = &world->serve,
        .alloc = kv_alloc_system(),
        .clock = kv_clock_system(),
        .address = "127.0.0.1",
        .keys = world->keys,
        .key_count = 2,
        .model = "Tiny-1",
        .sampler = {.temperature = 1, .top_p = 1, .top_k = UINT32_MAX, .seed = 0},
        .tokens_max = 4096,
        .seed = testing_seed("ids", 1),
        .log = hear,
        .context = world};
    http_limits_usual(&world->options.limits);
    pthread_mutex_init(&world->serve.lock, NULL);
    pthread_cond_init(&world->serve.changed, NULL);
    world->serve.is_ready = 1;
    world->serve.picture = support_http_picture();
}

void support_http_again(struct http_world *world) {
    struct kv_diag diag = {0};
    http_close(world->http);
    world->http = NULL;
    if (http_open(&world->options, &world->http, &diag) != KV_OK)
        fail_msg("%s", diag.text);
}

int support_http_set_up(void **state) {
    struct http_world *world = calloc(1, sizeof *world);
    if (world == NULL)
        return 1;
    support_http_fill(world);
    *state = world;
    return http_open(&world->options, &world->http, NULL) == KV_OK ? 0 : 1;
}

int support_http_tear_down(void **state) {
    struct http_world *world = *state;
    http_close(world->http);
    pthread_cond_destroy(&world->serve.changed);
    pthread_mutex_destroy(&world->serve.lock);
    free(world);
    return 0;
}

/* --- a connection */

int support_http_connect(const struct http_world *world) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(http_port(world->http))};
    int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_true(client >= 0);
    if (connect(client, (struct sockaddr *)&address, sizeof address) != 0)
        fail_msg("connect: %s", strerror(errno));
    return client;
}

void support_http_send(int client, const char *bytes, size_t count) {
    while (count > 0) {
        ssize_t sent = send(client, bytes, count, MSG_NOSIGNAL);
        if (sent <= 0)
            return; /* the answer says what became of it */
        bytes += sent;
        count -= (size_t)sent;
    }
}

size_t support_http_some(int client, char *out, size_t capacity) {
    struct pollfd readable = {client, POLLIN, 0};
    if (poll(&readable, 1, ANSWER_MS_MAX) != 1)
        fail_msg("no answer in %d ms", ANSWER_MS_MAX);
    ssize_t count = recv(client, out, capacity, 0);
    return count > 0 ? (size_t)count : 0;
}

/* --- an answer */

struct input {
    struct http_world *world;
    int client;
    size_t parsed;
    int ended;
};

static void more(struct input *input) {
    struct http_world *world = input->world;
    size_t room = sizeof world->reply - 1 - world->reply_bytes;
    assert_true(room > 0);
    size_t count = support_http_some(input->client, world->reply + world->reply_bytes, room);
    input->ended = count == 0;
    world->reply_bytes += count;
    world->reply[world->reply_bytes] = 0;
}

/* From `parsed` on; what it is at is behind it afterwards. */
static char *line(struct input *input) {
    struct http_world *world = input->world;
    for (;;) {
        char *end = strstr(world->reply + input->parsed, "\r\n");
        if (end != NULL) {
            char *first = world->reply + input->parsed;
            *end = 0;
            input->parsed = (size_t)(end - world->reply) + 2;
            return first;
        }
        if (input->ended)
            fail_msg("the connection ended inside an answer: `%s`", world->reply + input->parsed);
        more(input);
    }
}

static void need(struct input *input, size_t count) {
    while (input->world->reply_bytes < input->parsed + count) {
        if (input->ended)
            fail_msg("the connection ended inside a body");
        more(input);
    }
}

static void join_chunks(struct input *input) {
    struct http_world *world = input->world;
    char *to = world->body;
    for (;;) {
        size_t count = strtoul(line(input), NULL, 16);
        need(input, count + 2);
        memmove(to, world->reply + input->parsed, count);
        assert_memory_equal(world->reply + input->parsed + count, "\r\n", 2);
        input->parsed += count + 2;
        to += count;
        if (count == 0)
            break;
    }
    *to = 0;
    world->body_bytes = (size_t)(to - world->body);
}

const char *support_http_header(struct http_world *world, const char *name, char out[256]) {
    size_t bytes = strlen(name);
    for (const char *at = world->headers; *at != 0; at += strlen(at) + 2) {
        if (strncasecmp(at, name, bytes) == 0 && at[bytes] == ':') {
            snprintf(out, 256, "%s", at + bytes + 1 + strspn(at + bytes + 1, " "));
            return out;
        }
    }
    return NULL;
}

int support_http_receive(struct http_world *world, int client) {
    struct input input = {world, client, 0, 0};
    char value[256];
    world->reply_bytes = 0;
    world->reply[0] = 0;
    more(&input);
    if (input.ended)
        return 0;
    const char *first = line(&input);
    assert_int_equal(strncmp(first, "HTTP/1.", 7), 0);
    world->status = (int)strtol(first + 9, NULL, 10);
    world->headers = world->reply + input.parsed;
    while (*line(&input) != 0)
        continue;
    world->body = world->reply + input.parsed;
    world->body_bytes = 0;
    if (support_http_header(world, "Transfer-Encoding", value) != NULL) {
        join_chunks(&input);
    } else if (support_http_header(world, "Content-Length", value) != NULL) {
        world->body_bytes = strtoul(value, NULL, 10);
        need(&input, world->body_bytes);
    }
    return 1;
}

/* --- one request */

int support_http_call(struct http_world *world, const char *method, const char *path,
                      const char *headers, const char *body) {
    char *request = malloc(REQUEST_BYTES);
    int client = support_http_connect(world);
    assert_non_null(request);
    if (headers == NULL)
        headers = "Host: localhost\r\nAuthorization: Bearer " HTTP_KEY_A "\r\n"
                  "Content-Type: application/json\r\n";
    int bytes = snprintf(request, REQUEST_BYTES, "%s %s HTTP/1.1\r\n%s", method, path, headers);
    if (body != NULL)
        bytes += snprintf(request + bytes, REQUEST_BYTES - (size_t)bytes,
                          "Content-Length: %zu\r\n\r\n%s", strlen(body), body);
    else
        bytes += snprintf(request + bytes, REQUEST_BYTES - (size_t)bytes, "\r\n");
    assert_true(bytes < REQUEST_BYTES);
    support_http_send(client, request, (size_t)bytes);
    free(request);
    int answered = support_http_receive(world, client);
    close(client);
    return answered ? world->status : 0;
}

int support_http_get(struct http_world *world, const char *path) {
    return support_http_call(world, "GET", path, NULL, NULL);
}

int support_http_post(struct http_world *world, const char *path, const char *json) {
    return support_http_call(world, "POST", path, NULL, json);
}
