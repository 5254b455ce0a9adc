/* tests/test_http_load.c - many clients, slow ones, ones that leave, and bytes that are no HTTP.
 *
 * Responsible for: everybody else is served meanwhile, memory has bounds, a turn ends with its
 * client, an end in the middle of everything.
 * Not responsible for: what answers say (test_http.c).
 *
 * Fails with BREAK_STREAM_WAIT (a stream writes over what was not read), BREAK_WATCH (nobody is too
 * slow) and BREAK_TURN_GONE (a turn goes on for a client that left).
 */
#include "tools/http.h"

#include "tests/support_http.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHAT "/v1/chat/completions"
#define HEAD                                                                                       \
    "Host: localhost\r\nAuthorization: Bearer " HTTP_KEY_A "\r\nContent-Type: "                    \
    "application/json\r\n"
#define SAY(text) "{\"messages\":[{\"role\":\"user\",\"content\":\"" text "\"}]"

static const uint64_t ms = 1000000;
#ifdef __SANITIZE_ADDRESS__
enum { GROWN_KIB_MAX = 400 << 10 }; /* what was released waits in quarantine */
#else
enum { GROWN_KIB_MAX = 32 << 10 };
#endif

static void send_post(int client, const char *json) {
    char request[1024];
    int bytes = snprintf(request, sizeof request,
                         "POST " CHAT " HTTP/1.1\r\n" HEAD "Content-Length: %zu\r\n\r\n%s",
                         strlen(json), json);
    assert_true(bytes < (int)sizeof request);
    support_http_send(client, request, (size_t)bytes);
}

static uint64_t resident_kib(void) {
    uint64_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%*s %lu", &pages), 1);
    fclose(file);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE) / 1024;
}

/* Until the server ends the connection; what came is counted. */
static size_t drain(int client, char *first, size_t capacity) {
    static char bytes[65536];
    size_t total = 0, count = 0;
    while ((count = support_http_some(client, bytes, sizeof bytes)) > 0) {
        if (first != NULL && total < capacity - 1) {
            size_t kept = capacity - 1 - total < count ? capacity - 1 - total : count;
            memcpy(first + total, bytes, kept);
            first[total + kept] = 0;
        }
        total += count;
    }
    return total;
}

/* --- many */

static void idle_connections_are_no_hindrance(void **state) {
    struct http_world *world = *state;
    enum { IDLE = 200 };
    int clients[IDLE];
    for (int i = 0; i < IDLE; i++)
        clients[i] = support_http_connect(world);
    for (int i = 0; i < 20; i++)
        assert_int_equal(support_http_post(world, CHAT, SAY("say hello") "}"), 200);
    /* Each of them may still ask. */
    for (int i = 0; i < IDLE; i += 50) {
        send_post(clients[i], SAY("say late") "}");
        assert_int_equal(support_http_receive(world, clients[i]), 1);
        assert_int_equal(world->status, 200);
    }
    for (int i = 0; i < IDLE; i++)
        close(clients[i]);
}

static void more_connections_than_allowed_wait(void **state) {
    struct http_world *world = *state;
    enum { MOST = 8 };
    int clients[MOST];
    world->options.limits.connections = MOST;
    support_http_again(world);
    for (int i = 0; i < MOST; i++) {
        clients[i] = support_http_connect(world);
        send_post(clients[i], SAY("say one") "}");
        assert_int_equal(support_http_receive(world, clients[i]), 1);
    }
    int late = support_http_connect(world);
    send_post(late, SAY("say late") "}");
    close(clients[3]);
    assert_int_equal(support_http_receive(world, late), 1);
    assert_int_equal(world->status, 200);
    close(late);
    for (int i = 0; i < MOST; i++)
        if (i != 3)
            close(clients[i]);
}

static void a_thousand_short_requests(void **state) {
    struct http_world *world = *state;
    enum { REQUESTS = 1000, FIRST = 200 };
    uint64_t before_kib = 0;
    int client = support_http_connect(world);
    for (int i = 0; i < REQUESTS; i++) {
        if (i == FIRST)
            before_kib = resident_kib();
        if (i % 2 == 0) {
            assert_int_equal(support_http_post(world, CHAT, SAY("say hello") "}"), 200);
            continue;
        }
        send_post(client, SAY("say hello") ",\"stream\":true}");
        assert_int_equal(support_http_receive(world, client), 1);
        assert_int_equal(world->status, 200);
    }
    close(client);
    uint64_t grown_kib = resident_kib() - before_kib;
    printf("%d requests, %lu KiB more after the last %d\n", REQUESTS, grown_kib, REQUESTS - FIRST);
    assert_int_equal(world->serve.turns, REQUESTS);
    assert_true((int64_t)grown_kib < GROWN_KIB_MAX);
}

static void many_turns_at_once(void **state) {
    struct http_world *world = *state;
    enum { CLIENTS = 64 };
    int clients[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        clients[i] = support_http_connect(world);
        send_post(clients[i], SAY("count 2000") ",\"stream\":true}");
    }
    for (int i = 0; i < CLIENTS; i++) {
        assert_int_equal(support_http_receive(world, clients[i]), 1);
        assert_int_equal(world->status, 200);
        assert_non_null(strstr(world->body, "\"content\":\"1999 \""));
        assert_non_null(strstr(world->body, "data: [DONE]\n\n"));
        close(clients[i]);
    }
}

static void a_body_at_the_limit(void **state) {
    struct http_world *world = *state;
    static const char head[] = SAY("say x\"},{\"role\":\"user\",\"content\":\"");
    static const char tail[] = "\"},{\"role\":\"user\",\"content\":\"say x\"}]}";
    size_t size = HTTP_BODY_BYTES_MAX;
    char *json = malloc(size + 1), request[512];
    assert_non_null(json);
    /* head ends inside the content of its second message. */
    size_t head_bytes = sizeof head - 1 - strlen("\"}]");
    memset(json, 'a', size + 1);
    memcpy(json, head, head_bytes);
    memcpy(json + size - (sizeof tail - 1), tail, sizeof tail - 1);
    for (int over = 0; over < 2; over++) {
        int client = support_http_connect(world);
        int bytes = snprintf(request, sizeof request,
                             "POST " CHAT " HTTP/1.1\r\n" HEAD "Content-Length: %zu\r\n\r\n",
                             size + (size_t)over);
        support_http_send(client, request, (size_t)bytes);
        if (!over)
            support_http_send(client, json, size);
        assert_int_equal(support_http_receive(world, client), 1);
        assert_int_equal(world->status, over ? 413 : 200);
        close(client);
    }
    free(json);
    assert_int_equal(world->serve.request.message_count, 3);
    assert_int_equal(support_http_get(world, "/v1/models"), 200);
}

/* What waits for its turn counts as what is being received. */
static void texts_at_work_count(struct http_world *world, const char *json, size_t size) {
    char request[512];
    int client = support_http_connect(world);
    int bytes = snprintf(request, sizeof request,
                         "POST " CHAT " HTTP/1.1\r\n" HEAD "Content-Length: %zu\r\n\r\n", size);
    support_http_send(client, request, (size_t)bytes);
    support_http_send(client, json, size);
    support_http_await(&world->serve, &world->serve.running, 1);
    assert_int_equal(support_http_post(world, CHAT, SAY("say hello") "}"), 503);
    close(client);
    support_http_await(&world->serve, &world->serve.cancelled, 1);
}

static void bodies_at_work_are_bounded(void **state) {
    struct http_world *world = *state;
    static const char tail[] = SAY("wait") "}";
    enum { SIZE = 130000 }; /* in 131072 bytes while it is received */
    char *json = malloc(SIZE);
    assert_non_null(json);
    world->options.limits.bodies_bytes = 132000;
    support_http_again(world);
    memset(json, ' ', SIZE);
    memcpy(json + SIZE - (sizeof tail - 1), tail, sizeof tail - 1);
    texts_at_work_count(world, json, SIZE);
    free(json);
    /* Once it is over there is room again; the worker may still be at its last steps. */
    int status = 0;
    for (int i = 0; i < 1000 && status != 200; i++)
        status = support_http_post(world, CHAT, SAY("say hello") "}");
    assert_int_equal(status, 200);
}

/* --- slow */

static void who_does_not_read_loses_the_turn(void **state) {
    struct http_world *world = *state;
    world->options.limits.stall_ns = 300 * ms;
    support_http_again(world);
    uint64_t before_kib = resident_kib();
    int client = support_http_connect(world);
    send_post(client, SAY("count 1000000") ",\"stream\":true,\"max_tokens\":1000000}");
    support_http_await(&world->serve, &world->serve.turns, 1);
    /* Others are served while it stalls. */
    assert_int_equal(support_http_post(world, CHAT, SAY("say hello") "}"), 200);
    support_http_await(&world->serve, &world->serve.stopped_by_piece, 1);
    uint64_t grown_kib = resident_kib() - before_kib;
    printf("%lu KiB more for a stream that nobody reads\n", grown_kib);
    assert_true((int64_t)grown_kib < GROWN_KIB_MAX);
    /* What it reads now ends without the closing chunk: it cannot take that for an answer. */
    char tail[65536] = "";
    size_t count = 0, total = 0;
    while ((count = support_http_some(client, tail, sizeof tail - 1)) > 0) {
        tail[count] = 0;
        total += count;
        assert_null(strstr(tail, "[DONE]"));
    }
    assert_true(total > 1000);
    close(client);
}

/* BREAK_STREAM_WAIT. */
static void a_slow_reader_gets_every_byte(void **state) {
    struct http_world *world = *state;
    int client = support_http_connect(world);
    send_post(client, SAY("count 20000") ",\"stream\":true,\"max_tokens\":20000}");
    support_http_await(&world->serve, &world->serve.turns, 1);
    for (int i = 0; i < 20; i++) /* the ring fills meanwhile */
        assert_int_equal(support_http_post(world, CHAT, SAY("say hello") "}"), 200);
    assert_int_equal(support_http_receive(world, client), 1);
    char wanted[32];
    const char *at = world->body;
    for (int i = 0; i < 20000; i++) {
        snprintf(wanted, sizeof wanted, "\"content\":\"%d \"", i);
        at = strstr(at, wanted);
        if (at == NULL)
            fail_msg("piece %d is not in its place", i);
    }
    assert_non_null(strstr(at, "data: [DONE]\n\n"));
    close(client);
}

/* BREAK_WATCH. */
static void headers_and_bodies_must_arrive(void **state) {
    struct http_world *world = *state;
    static const char *const parts[] = {
        "POST " CHAT " HTTP/1.1\r\nHost: local",
        "POST " CHAT " HTTP/1.1\r\n" HEAD "Content-Length: 100\r\n\r\n{\"messages\":[",
        "POST " CHAT " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"};
    char answer[1024] = "";
    world->options.limits.head_ns = 300 * ms;
    world->options.limits.body_ns = 200 * ms;
    support_http_again(world);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        int client = support_http_connect(world);
        support_http_send(client, parts[i], strlen(parts[i]));
        drain(client, answer, sizeof answer);
        if (strncmp(answer, "HTTP/1.1 408 ", 13) != 0)
            fail_msg("part %zu: `%s`", i, answer);
        assert_non_null(strstr(answer, "\"code\":\"timeout\""));
        close(client);
    }
    assert_int_equal(world->serve.turns, 0);
}

static void a_body_that_trickles_has_an_end(void **state) {
    struct http_world *world = *state;
    static const char head[] = "POST " CHAT " HTTP/1.1\r\n" HEAD "Content-Length: 100000\r\n\r\n";
    char answer[1024] = "";
    world->options.limits.read_ns = 300 * ms;
    support_http_again(world);
    int client = support_http_connect(world);
    support_http_send(client, head, sizeof head - 1);
    /* A byte with each request of somebody else: it is never silent. */
    for (int i = 0; i < 2000 && recv(client, answer, 1, MSG_PEEK | MSG_DONTWAIT) != 1; i++) {
        support_http_send(client, " ", 1);
        assert_int_equal(support_http_get(world, "/v1/models"), 200);
    }
    drain(client, answer, sizeof answer);
    assert_int_equal(strncmp(answer, "HTTP/1.1 408 ", 13), 0);
    close(client);
}

static void silence_ends_a_connection(void **state) {
    struct http_world *world = *state;
    world->options.limits.idle_seconds = 1;
    support_http_again(world);
    int client = support_http_connect(world);
    assert_int_equal(drain(client, NULL, 0), 0);
    close(client);
}

/* --- leaving */

/* BREAK_TURN_GONE. */
static void who_leaves_ends_the_turn(void **state) {
    struct http_world *world = *state;
    static const char *const bodies[] = {SAY("wait") "}", SAY("wait") ",\"stream\":true}"};
    for (uint32_t i = 0; i < 2; i++) {
        int client = support_http_connect(world);
        send_post(client, bodies[i]);
        support_http_await(&world->serve, &world->serve.turns, i + 1);
        close(client);
        support_http_await(&world->serve, &world->serve.cancelled, i + 1);
    }
    /* In the middle of a stream. */
    char some[256];
    int client = support_http_connect(world);
    send_post(client, SAY("count 1000000") ",\"stream\":true,\"max_tokens\":1000000}");
    assert_true(support_http_some(client, some, sizeof some) > 0);
    close(client);
    support_http_await(&world->serve, &world->serve.stopped_by_piece, 1);
}

static void a_turn_has_a_deadline(void **state) {
    struct http_world *world = *state;
    world->options.limits.turn_ns = 100 * ms;
    support_http_again(world);
    assert_int_equal(support_http_post(world, CHAT, SAY("wait") "}"), 408);
}

static void an_end_in_the_middle_of_everything(void **state) {
    struct http_world *world = *state;
    enum { CLIENTS = 12 };
    int clients[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        clients[i] = support_http_connect(world);
        if (i % 4 == 0)
            send_post(clients[i], SAY("wait") "}");
        else if (i % 4 == 1)
            send_post(clients[i], SAY("count 1000000") ",\"stream\":true,\"max_tokens\":1000000}");
        else if (i % 4 == 2)
            support_http_send(clients[i], "POST / HTT", 10);
    }
    support_http_await(&world->serve, &world->serve.turns, CLIENTS / 2);
    http_close(world->http);
    world->http = NULL;
    assert_int_equal(world->serve.running, 0);
    for (int i = 0; i < CLIENTS; i++)
        close(clients[i]);
}

/* What the turn said last goes out, with the stream's own end. BREAK_STOPPED_STREAM */
static void a_stream_that_is_stopped_has_its_end(void **state) {
    struct http_world *world = *state;
    char answer[16384] = "";
    int client = support_http_connect(world);
    send_post(client, SAY("hold") ",\"stream\":true}");
    for (size_t count = 0; strstr(answer, "\"content\":\"held\"") == NULL;) {
        size_t more = support_http_some(client, answer + count, sizeof answer - 1 - count);
        assert_true(more > 0);
        answer[count += more] = 0;
    }
    http_close(world->http);
    world->http = NULL;
    drain(client, answer, sizeof answer);
    assert_non_null(strstr(answer, "\"finish_reason\":\"length\""));
    assert_non_null(strstr(answer, "data: [DONE]\n\n\r\n0\r\n\r\n"));
    close(client);
}

/* --- no HTTP */

static void bytes_that_are_no_request(void **state) {
    struct http_world *world = *state;
    static const char *const bad[] = {
        "\r\n\r\n\r\n",
        "GET\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "\x16\x03\x01\x02\x01\xfc",
        "GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        "POST " CHAT " HTTP/1.1\r\n" HEAD "Content-Length: 99999999999999999999999\r\n\r\n",
        "POST " CHAT " HTTP/1.1\r\n" HEAD "Content-Length: 2x\r\n\r\n{}",
        "POST " CHAT " HTTP/1.1\r\n" HEAD "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        "POST " CHAT " HTTP/1.1\r\n" HEAD "Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        "GET /health HTTP/1.1\r\nHost localhost\r\n\r\n",
        "GET /health HTTP/1.1\r\n: x\r\n\r\n",
        "GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "GET /%00%ff%zz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /health HTTP/1.1\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "POST " CHAT " HTTP/1.1\r\n" HEAD "Content-Length: 50\r\n\r\n{\"messages\""};
    static char head[80000];
    struct testing_random random;
    char noise[512];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int client = support_http_connect(world);
        support_http_send(client, bad[i], strlen(bad[i]));
        shutdown(client, SHUT_WR);
        drain(client, NULL, 0);
        close(client);
        assert_int_equal(support_http_get(world, "/v1/models"), 200);
    }
    /* Headers without end, and a line without end. */
    for (int i = 0; i < 2; i++) {
        int bytes = snprintf(head, sizeof head, "GET /health%s", i == 0 ? " HTTP/1.1\r\n" : "");
        memset(head + bytes, 'a', sizeof head - (size_t)bytes);
        if (i == 0)
            for (size_t at = (size_t)bytes; at + 8 < sizeof head; at += 64)
                memcpy(head + at, "\r\nX: ", 5);
        int client = support_http_connect(world);
        support_http_send(client, head, sizeof head);
        shutdown(client, SHUT_WR);
        drain(client, NULL, 0);
        close(client);
    }
    testing_random_init(&random, testing_seed("noise", 20261130));
    for (int i = 0; i < 100; i++) {
        testing_random_bytes(&random, noise, sizeof noise);
        int client = support_http_connect(world);
        support_http_send(client, noise, sizeof noise);
        shutdown(client, SHUT_WR);
        drain(client, NULL, 0);
        close(client);
    }
    assert_int_equal(support_http_post(world, CHAT, SAY("say hello") "}"), 200);
    assert_int_equal(world->serve.turns, 1);
}

#define SERVED(test)                                                                               \
    cmocka_unit_test_setup_teardown(test, support_http_set_up, support_http_tear_down)

TESTING_MAIN(SERVED(idle_connections_are_no_hindrance), SERVED(more_connections_than_allowed_wait),
             SERVED(a_thousand_short_requests), SERVED(many_turns_at_once),
             SERVED(a_body_at_the_limit), SERVED(bodies_at_work_are_bounded),
             SERVED(who_does_not_read_loses_the_turn), SERVED(a_slow_reader_gets_every_byte),
             SERVED(headers_and_bodies_must_arrive), SERVED(a_body_that_trickles_has_an_end),
             SERVED(silence_ends_a_connection), SERVED(who_leaves_ends_the_turn),
             SERVED(a_turn_has_a_deadline), SERVED(an_end_in_the_middle_of_everything),
             SERVED(a_stream_that_is_stopped_has_its_end), SERVED(bytes_that_are_no_request))
