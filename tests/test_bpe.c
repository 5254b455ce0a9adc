/* tests/test_bpe.c - merge order against a plain definition.
 *
 * Responsible for: scan and heap giving what "lowest rank, then leftmost, until none is left"
 * gives, on short and long random symbol strings.
 * Not responsible for: real vocabularies (test_tokenizer.c).
 */
#include "engine/model/bpe.h"

#include "tests/testing.h"

#include <stdio.h>
#include <string.h>

enum { LETTERS = 4, MERGES = 60, SYMBOLS_MAX = 400 };

struct rule {
    uint32_t left, right, rank, made;
};

static void make_rules(struct testing_random *random, struct rule *rules, struct bpe *bpe) {
    assert_true(bpe_make(bpe, kv_alloc_system(), MERGES));
    for (uint32_t i = 0; i < MERGES; i++) {
        rules[i] = (struct rule){.left = (uint32_t)testing_random_below(random, LETTERS + i),
                                 .right = (uint32_t)testing_random_below(random, LETTERS + i),
                                 .rank = (i * 37) % MERGES,
                                 .made = LETTERS + i};
        for (uint32_t j = 0; j < i; j++) {
            /* The first merge of a pair is the one that counts. */
            if (rules[j].left == rules[i].left && rules[j].right == rules[i].right)
                rules[i].left = rules[i].right = BPE_NONE - 1;
        }
        bpe_add(bpe, rules[i].left, rules[i].right,
                (struct bpe_merge){.rank = rules[i].rank, .made = rules[i].made});
    }
}

static size_t run_plainly(const struct rule *rules, uint32_t *symbols, size_t n) {
    for (;;) {
        const struct rule *best = NULL;
        size_t place = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            for (uint32_t r = 0; r < MERGES; r++) {
                if (rules[r].left == symbols[i] && rules[r].right == symbols[i + 1] &&
                    (best == NULL || rules[r].rank < best->rank)) {
                    best = &rules[r];
                    place = i;
                }
            }
        }
        if (best == NULL)
            return n;
        symbols[place] = best->made;
        for (size_t i = place + 1; i + 1 < n; i++)
            symbols[i] = symbols[i + 1];
        n--;
    }
}

/* BREAK_MERGE_ORDER forgets that ties go to the leftmost. */
static void both_ways_follow_the_definition(void **state) {
    (void)state;
    struct testing_random random;
    struct bpe_scratch scratch = {.alloc = kv_alloc_system()};
    uint64_t merged = 0;
    testing_random_init(&random, testing_seed("merges", 11));
    for (int round = 0; round < 300; round++) {
        struct rule rules[MERGES];
        struct bpe bpe;
        uint32_t symbols[SYMBOLS_MAX], plain[SYMBOLS_MAX];
        size_t n = 1 + (size_t)testing_random_below(&random, round % 2 == 0 ? 48 : SYMBOLS_MAX);
        size_t count = n;
        make_rules(&random, rules, &bpe);
        for (size_t i = 0; i < n; i++) {
            uint64_t letter = testing_random_below(&random, LETTERS * 8);
            symbols[i] = letter == 0 ? BPE_NONE : (uint32_t)(letter % LETTERS);
            plain[i] = symbols[i];
        }
        assert_int_equal(bpe_run(&bpe, &scratch, symbols, &count), KV_OK);
        size_t wanted = run_plainly(rules, plain, n);
        merged += n - count;
        assert_int_equal(count, wanted);
        assert_memory_equal(symbols, plain, count * sizeof symbols[0]);
        bpe_release(&bpe, kv_alloc_system());
    }
    printf("%llu merges compared\n", (unsigned long long)merged);
    assert_true(merged > 1000);
    bpe_scratch_release(&scratch);
}

static void no_memory_is_said(void **state) {
    (void)state;
    struct testing_random random;
    struct rule rules[MERGES];
    struct bpe bpe;
    testing_random_init(&random, testing_seed("merges", 12));
    make_rules(&random, rules, &bpe);
    for (uint64_t k = 1; k <= 3; k++) {
        struct testing_alloc testing;
        uint32_t symbols[100] = {0};
        size_t count = 100;
        testing_alloc_init(&testing, k);
        struct bpe_scratch scratch = {.alloc = &testing.alloc};
        assert_int_equal(bpe_run(&bpe, &scratch, symbols, &count), k <= 2 ? KV_ERR_NOMEM : KV_OK);
        bpe_scratch_release(&scratch);
        assert_int_equal(testing.live_count, 0);
    }
    bpe_release(&bpe, kv_alloc_system());
}

TESTING_MAIN(cmocka_unit_test(both_ways_follow_the_definition), cmocka_unit_test(no_memory_is_said))
