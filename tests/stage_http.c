/* tests/stage_http.c - the HTTP side over the fake service, served until standard input ends.
 *
 * Responsible for: something to point a browser or a client at: prints the address and a key.
 * Not responsible for: what they should see (openai_client.py, page_check.py).
 *
 * `open` as an argument serves without keys.
 */
#include "tests/support_http.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    struct http_world *world = calloc(1, sizeof *world);
    struct kv_diag diag = {0};
    char byte = 0;
    if (world == NULL)
        return 1;
    support_http_fill(world);
    if (argc > 1 && strcmp(argv[1], "open") == 0)
        world->options.key_count = 0;
    if (http_open(&world->options, &world->http, &diag) != KV_OK) {
        fprintf(stderr, "%s\n", diag.text);
        return 1;
    }
    printf("http://127.0.0.1:%u %s\n", http_port(world->http), HTTP_KEY_A);
    fflush(stdout);
    while (read(STDIN_FILENO, &byte, 1) > 0)
        continue;
    http_close(world->http);
    free(world);
    return 0;
}
