/* tools/cmd_help.c - the table of commands and what is said about them.
 *
 * Responsible for: names, arguments, help and examples of every command; help and version.
 * Not responsible for: the flags' own lines (config.c).
 */
#include "tools/cmd.h"
#include "tools/cmd_manual.h"
#include "tools/json_text.h"

#include "engine/export.h"
#include "engine/receipt.h"
#include "engine/record.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

#define VERSION "0.1.0"

static const struct cmd_entry entries[] = {
    {"chat", "", "talk to a session; every turn is saved",
     "Wakes the session, proves it, and goes on where it was; a name that is nowhere becomes a "
     "new\n"
     "session. Answers appear as they are made. Ctrl-C stops an answer, a second one leaves.\n"
     "In it: /retry another answer, /edit TEXT another message, /fork NAME, /save [TAG], /sleep,\n"
     "/quit, /help. Without a terminal each line of standard input is one message or one of these.",
     "  coldplane chat --session travel\n"
     "  coldplane chat --session travel --system 'You answer in one sentence.'\n"
     "  echo 'What is a slot?' | coldplane chat --session notes\n",
     0, 0,
     CONFIG_SESSION | CONFIG_ENGINE | CONFIG_CREATE | CONFIG_TURN | CONFIG_SYSTEM | CONFIG_WAKING |
         CONFIG_WRITE,
     cmd_chat},
    {"run", "NAME --prompt TEXT", "one turn: say TEXT, print the answer, save",
     "Wakes or makes session NAME, says TEXT, prints the answer and saves the turn.\n"
     "With --json: the text, token counts, and the receipts of the wake and of the save.\n"
     "What a session is made with (recipe, ages, temperature, seed …) stays with it for ever;\n"
     "those flags matter only when NAME is new.",
     "  coldplane run travel --prompt 'What should I pack for Oslo in May?'\n"
     "  coldplane run notes --prompt - <letter.txt --json\n",
     1, 1,
     CONFIG_PROMPT | CONFIG_ENGINE | CONFIG_CREATE | CONFIG_TURN | CONFIG_SYSTEM | CONFIG_WAKING |
         CONFIG_WRITE,
     cmd_run},
    {"ls", "", "list the sessions of the store", "Reads beside a running writer; needs no model.",
     "  coldplane ls\n  coldplane ls --json\n", 0, 0, 0, cmd_ls},
    {"show", "NAME", "what is stored of a session",
     "Model, recipe, tokens, turns, blocks, needles and fingerprint of the newest snapshot; with\n"
     "--text the chat itself, turn by turn, each under its number and role (with --json as `text`\n"
     "of each turn). Reads beside a running writer; needs no model, but for --text the file of "
     "the\n"
     "session's model, of which it takes the vocabulary.",
     "  coldplane show travel\n  coldplane show travel --text | less\n", 1, 1, CONFIG_TEXT,
     cmd_show},
    {"snapshot", "NAME", "a durable snapshot that later turns do not replace",
     "Wakes the session, asks its needles with and without their hole, writes the snapshot and\n"
     "prints the receipt. With --tag the snapshot is found again as NAME@T.",
     "  coldplane snapshot travel\n  coldplane snapshot travel --tag oslo\n", 1, 1,
     CONFIG_TAG | CONFIG_ENGINE | CONFIG_WRITE, cmd_snapshot},
    {"restore", "NAME[@TAG]", "wake a session, prove it, print the receipt",
     "With a tag: wakes and proves that snapshot, then the session goes on from it; where it "
     "stood\n"
     "stays as tag before-restore-N, unless it has a tag. Without: writes nothing.\n"
     "Reads everything, checks every digest, compares the fingerprint, asks the needles.\n"
     "A needle recorded at this very length must pass again, bit for bit on the same\n"
     "numerics. One recorded at another length (before later turns) is asked and counted in the\n"
     "receipt, but refuses nothing: the session that never slept may have stopped answering too.\n"
     "In a daemon a session that is awake stays so: what is stored of it is proven beside it.\n"
     "Exit 4: stored bytes changed. Exit 7: bytes were right, the proof was not.",
     "  coldplane restore travel\n  coldplane restore travel@oslo --json\n", 1, 1,
     CONFIG_ENGINE | CONFIG_WAKING | CONFIG_WRITE, cmd_restore},
    {"fork", "NAME[@TAG] NEW", "a second session from here on",
     "NEW has the text, memory and needles of NAME (or of its snapshot TAG) and shares what is\n"
     "stored; each goes on alone, and each may be removed. Needs no model.",
     "  coldplane fork travel alternative\n  coldplane fork travel@oslo by-train\n", 2, 2,
     CONFIG_WRITE, cmd_fork},
    {"rollback", "NAME --to N|turn:K", "go back to an earlier token or turn",
     "The session goes on from its first N tokens, or from the end of turn K. Within the newest\n"
     "256 to 511 tokens nothing is computed again. Further back the last 256 to 511 of the N are\n"
     "prefilled again, which the receipt says: these are not bit-equal to what they were. Where\n"
     "the session stood stays as tag before-restore-N, unless it has a tag.",
     "  coldplane rollback travel --to turn:6\n  coldplane rollback travel --to 3000 --json\n", 1,
     1, CONFIG_BACK | CONFIG_ENGINE | CONFIG_WRITE, cmd_rollback},
    {"rename", "NAME NEW", "give a session another name",
     "With all its snapshots, tags and receipts. Needs no model.",
     "  coldplane rename travel oslo\n", 2, 2, CONFIG_WRITE, cmd_rename},
    {"pin", "NAME", "keep a session from giving way to others",
     "It is not put to sleep for others, not removed, degraded or expired until it is unpinned.",
     "  coldplane pin travel\n", 1, 1, CONFIG_WRITE, cmd_pin},
    {"unpin", "NAME", "take the pin away", "", "  coldplane unpin travel\n", 1, 1, CONFIG_WRITE,
     cmd_pin},
    {"needle", "add|plant|check|ls|rm NAME", "facts that a session must still know",
     "add:   a fact that was said in the chat: --ask the question, --expect the answer as it "
     "stands\n"
     "       there; asked plain and with a hole where it stands, kept as with plant, then saved.\n"
     "plant: states the fact in a user turn, asks it plain and with a hole where it stands, and\n"
     "       keeps it only if it was answered and could have failed; then saves. One that is not\n"
     "       kept stays recorded (exit 0), no wake or audit asks it, a later snapshot or sleep "
     "may\n"
     "       keep it.\n"
     "check: asks the needles again (or the one of --key), with and without the hole, and says of\n"
     "       each: kept (passed, and less likely by 2 nats with the hole), cannot-fail (passed, "
     "but\n"
     "       not so much less likely), or failed. Exit 7 when one fails that was kept till now.\n"
     "ls:    the recorded needles, kept or not; needs no model.\n"
     "rm:    forgets the needle of --key; what was said stays.\n"
     "In a daemon a session that is awake is asked as it is, one that is asleep sleeps again.",
     "  coldplane needle add travel --ask 'Where do we go?' --expect Oslo --answer-prefix 'To '\n"
     "  coldplane needle plant travel --key 'green lamp' --value 4817\n"
     "  coldplane needle check travel\n"
     "  coldplane needle ls travel\n"
     "  coldplane needle rm travel --key 'green lamp'\n",
     2, 2, CONFIG_NEEDLE | CONFIG_ENGINE | CONFIG_WRITE, cmd_needle},
    {"verify", "[NAME]", "read and digest what is stored",
     "Every extent of every snapshot of NAME, or of all sessions. Reads beside a running\n"
     "writer; needs no model. Exit 4 when anything is not what was written.",
     "  coldplane verify\n  coldplane verify travel --json\n", 0, 1, 0, cmd_verify},
    {"audit", "", "does any session answer with another one's facts?",
     "Wakes every session of the store, asks its own needles again, then the questions of the\n"
     "others and one about a fact that nobody has: no answer may be another session's value, and\n"
     "under a key that two sessions have its own value must be likelier than the other's. Names\n"
     "sessions, never values. A value that stands in a session's own text too (told there, or "
     "come\n"
     "with a fork) is no other's: it is not asked there, only counted. Writes nothing. Exit 7 "
     "when\n"
     "anything is wrong. In a daemon sessions that are awake are asked as they are, each when\n"
     "nobody else works on it.",
     "  coldplane audit\n  coldplane audit --json\n", 0, 0, CONFIG_ENGINE, cmd_audit},
    {"export", "NAME[@TAG] FILE|-", "one session into one file",
     "Everything that the newest snapshot of NAME (or the one with the tag) needs, also of what "
     "it\n"
     "shares with others, checked while it is read; - is standard output. The file appears when "
     "it\n"
     "is complete and never replaces another. Reads beside a running\n"
     "writer; needs no model. Not compressed and not encrypted: pipe it through programs\n"
     "that do. The form is snapshot/EXPORT.md.",
     "  coldplane export travel travel.cpx\n"
     "  coldplane export travel - | zstd >travel.cpx.zst\n",
     2, 2, 0, cmd_export},
    {"import", "FILE|-", "a session from such a file",
     "Checks model, counts, digests, scales and token ids of the whole file before anything can "
     "be\n"
     "seen; a file that is cut or damaged leaves nothing behind. `coldplane restore` then proves\n"
     "the session. Exit 3: name taken, other model, newer version. Exit 4: damaged.",
     "  coldplane import travel.cpx --as oslo\n"
     "  zstd -dc travel.cpx.zst | coldplane import -\n",
     1, 1, CONFIG_IMPORT | CONFIG_ENGINE | CONFIG_WRITE, cmd_import},
    {"rm", "NAME[@TAG]", "remove a session and its snapshots, or one tag",
     "Nothing of it can be restored afterwards; what forks share with it stays with them. Its\n"
     "space comes back with `coldplane gc`, or by itself when a save finds no room; works on a\n"
     "full disk.\n"
     "--purge also punches holes where its bytes stood and makes the index anew; on a file system\n"
     "without holes it writes the segments again without them, which may take as long as reading\n"
     "and writing the whole store. In a daemon saves of others wait meanwhile.",
     "  coldplane rm travel\n  coldplane rm travel@oslo\n  coldplane rm travel --purge\n", 1, 1,
     CONFIG_REMOVE | CONFIG_WRITE, cmd_rm},
    {"expire", "NAME", "let a session go whole when the byte budget is reached",
     "At store-max a save that finds no room takes whole sessions that were named here first, the\n"
     "longest unused one first. Nothing goes before that, and a later save of the session takes "
     "the\n"
     "permission away. --undo does so at once. `ls` and `show` say which sessions may go, `stats`\n"
     "what went.",
     "  coldplane expire draft\n  coldplane expire draft --undo\n", 1, 1,
     CONFIG_EXPIRE | CONFIG_WRITE, cmd_expire},
    {"stats", "", "the store: bytes, segments, what is in force",
     "Bytes written and why, budgets and what is left of them, what the byte budget made go.\n"
     "Reads beside a running writer; needs no model.",
     "  coldplane stats\n", 0, 0, 0, cmd_stats},
    {"top", "", "the store and its sessions, drawn again and again",
     "Disk, budget, writer, and the sessions by last use with a bar of their tiers: each "
     "character\n"
     "is a sixteenth of the session. q leaves. Where there is no terminal, and with --once, one\n"
     "picture is printed. Reads beside a running writer; needs no model. Where a daemon holds the\n"
     "store, it tells its slots, who is awake and what waits to be spilled, too.",
     "  coldplane top\n  coldplane top --once\n", 0, 0, CONFIG_TOP, cmd_top},
    {"ps", "", "who is awake, at work or asleep, and what waits",
     "Each session with its state, tokens, slots, since when it is so, and who works on it: a\n"
     "request by its id, a command with its process; else whose it is. (not saved) is one whose\n"
     "newest tokens are in memory only, (N wait) says how many stand in line. Above it slots, "
     "requests, "
     "commands\n"
     "and writes that wait; a warning while the disk is nearly full or something could not be\n"
     "saved. Where no daemon holds the store, all sessions are asleep. Needs no model.",
     "  coldplane ps\n  coldplane ps --json\n", 0, 0, 0, cmd_ps},
    {"receipt", "[ID]", "receipts of earlier saves and wakes",
     "The newest 512 are kept in COLDPLANE_HOME/receipts, also of refused ones; without ID they "
     "are\n"
     "listed. `rm --purge` forgets those of the name.",
     "  coldplane receipt\n  coldplane receipt 18a3f0c2d4e5b601 --json\n", 0, 1, 0, cmd_receipt},
    {"gc", "", "give back the space that nothing uses",
     "Deletes records that belong to no session, punches holes where nothing lives (this works on\n"
     "a disk without a free block), then moves what lives out of segments that are less than half\n"
     "live, and removes those; moving needs at most two segments (128 MiB) of free space. Safe at\n"
     "any power cut; nothing else may write meanwhile, but in a daemon, where others save between\n"
     "two segments and while --rate is waited for. --dry-run says what would go.",
     "  coldplane gc --dry-run\n  coldplane gc --rate 50MiB --json\n", 0, 0,
     CONFIG_GC | CONFIG_WRITE, cmd_gc},
    {"fsck", "", "compare segments, index and sessions",
     "Compares the batch records of the segments with the index, record for record and both ways,\n"
     "then names, snapshots, pages, blocks and counts. Changes nothing by itself.\n"
     "--read-data      also digests every extent and checks roots and block chains.\n"
     "--repair         mends only what loses nothing more: counts, unused records, records that\n"
     "                 only the index knows.\n"
     "--rebuild-index  makes the index anew from the batch records; deleted sessions stay "
     "deleted.\n"
     "Exit 4 when anything is damaged. In a daemon ctrl-C stops it; saves wait meanwhile, with\n"
     "--read-data behind all records from session to session only; and the index is made anew "
     "only\n"
     "when the segments say the same as the one in use: exit 3 otherwise, and coldplaned must be\n"
     "stopped for it.",
     "  coldplane fsck\n  coldplane fsck --read-data --json\n  coldplane fsck --repair\n", 0, 0,
     CONFIG_FSCK | CONFIG_WRITE, cmd_fsck},
    {"scrub", "", "read everything again, slowly",
     "Goes on where the last run ended. Names the first bad extent of each damaged record and "
     "every\n"
     "session that uses it. Ctrl-C ends it; the next run goes on there. Exit 4 when anything is "
     "bad.\n"
     "A damaged plane that only refines (KL, VR2, VR1) need not cost the session: --keep-lower "
     "gives\n"
     "it up, and the next wake proves the rest by the fingerprint of the ladder's floor. Where "
     "more\n"
     "than that is damaged, the snapshots that do not need it are named. In a daemon others save\n"
     "between two records and while --rate is waited for; the look at the segments, at the end, "
     "is\n"
     "made in one piece.",
     "  coldplane scrub --rate 20MiB\n  coldplane scrub --restart --keep-lower --json\n", 0, 0,
     CONFIG_SCRUB | CONFIG_WRITE, cmd_scrub},
    {"tokenize", "", "text on standard input to token ids",
     "Bytes that are not UTF-8 become the tokens of those bytes; where the vocabulary lacks a "
     "byte,\n"
     "the token of U+FFFD stands in, and it is counted.",
     "  echo -n 'hello' | coldplane tokenize\n"
     "  coldplane tokenize --special --json <prompt.txt\n",
     0, 0, CONFIG_TOKENS, cmd_tokenize},
    {"bench", "store|restore|model|kv-quality|rates|attention", "measure on this machine",
     "store:      writes and reads through a store made for it, beside plain O_DIRECT I/O.\n"
     "restore:    wakes session bench-TOKENS, beside a plain reader of the same bytes and beside\n"
     "            prefilling those tokens; --build makes that session first. Without it an empty\n"
     "            store is an error, not a fast restore. Then the time to a first token, exact,\n"
     "            eager and out of the RAM tier.\n"
     "            Beside a daemon that makes the session, but wakes it in an engine of its own.\n"
     "model:      prefill and decode speed up to --tokens, beside plain C.\n"
     "kv-quality: what each tier of --recipe v3, v2, v1 or fp8 costs against BF16; --top k8v8 adds "
     "that.\n"
     "rates:      disk, unzip, copy and prefill of this machine, measured with a scratch session "
     "in\n"
     "            the store and kept there for the estimates of `show` and for --wake faster; in "
     "a\n"
     "            daemon beside whatever else it does.\n"
     "attention:  decode attention on the GPU, alone and inside a whole decode step of an 8B\n"
     "            model, against the card's copy and read rates; answers are checked.",
     "  coldplane bench store --size 1GiB\n"
     "  coldplane bench restore --build --tokens 7500\n"
     "  coldplane bench kv-quality --json\n",
     1, 1, CONFIG_BENCH | CONFIG_ENGINE | CONFIG_CREATE | CONFIG_WRITE, cmd_bench},
    {"version", "", "versions of program and formats", "", "", 0, 0, 0, cmd_version},
    {"help", "[COMMAND [ACTION]]", "this list, or the help of a command", "",
     "  coldplane help needle\n  coldplane help needle plant\n", 0, 2, 0, cmd_help},
};

static void print_help(const struct cmd_entry *entry) {
    printf("usage: coldplane %s%s%s [flags]\n%s.\n", entry->name,
           entry->arguments[0] != 0 ? " " : "", entry->arguments, entry->summary);
    if (entry->help[0] != 0)
        printf("\n%s\n", entry->help);
    printf("\nFlags:\n");
    config_help(entry->groups | CONFIG_COMMON, stdout);
    if (entry->examples[0] != 0)
        printf("\nExamples:\n%s", entry->examples);
}

/* The action that is asked about, of a command such as `needle`, whose arguments begin with its
 * actions and whose help has a paragraph "action: …" for each; NULL when it has none or none is
 * named. */
static const char *action_of(const struct cmd *cmd, const struct cmd_entry *entry) {
    const struct config *config = cmd->config;
    uint32_t at = strcmp(config->words[0], "help") == 0 ? 2 : 1;
    const char *action = at < config->word_count ? config->words[at] : NULL;
    const char *word = entry->arguments;
    size_t end = strcspn(word, " ");
    if (action == NULL || memchr(word, '|', end) == NULL)
        return NULL;
    for (size_t first = 0; first < end;) {
        size_t length = strcspn(word + first, "| ");
        if (strlen(action) == length && memcmp(word + first, action, length) == 0)
            return action;
        first += length + 1;
    }
    return NULL;
}

/* Lines of `text` that begin with `begin`, and with `more` the indented ones behind them. */
static void print_lines(const char *text, const char *begin, int more) {
    int on = 0;
    while (*text != 0) {
        size_t length = strcspn(text, "\n");
        on = strncmp(text, begin, strlen(begin)) == 0 || (on && more && text[0] == ' ');
        if (on)
            printf("%.*s\n", (int)length, text);
        text += length + (text[length] == '\n');
    }
}

static void print_action(const struct cmd_entry *entry, const char *action) {
    char begin[64];
    printf("usage: coldplane %s %s%s [flags]\n\n", entry->name, action,
           entry->arguments + strcspn(entry->arguments, " "));
    snprintf(begin, sizeof begin, "%.20s:", action);
    print_lines(entry->help, begin, 1);
    printf("\nFlags:\n");
    config_help(entry->groups | CONFIG_COMMON, stdout);
    snprintf(begin, sizeof begin, "  coldplane %.20s %.20s ", entry->name, action);
    if (strstr(entry->examples, begin) == NULL)
        return;
    printf("\nExamples:\n");
    print_lines(entry->examples, begin, 0);
}

static void print_overview(void) {
    printf("coldplane keeps long chat sessions, puts them to sleep on disk and wakes them with "
           "proof.\n\nusage: coldplane COMMAND [arguments] [flags]\n\n");
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        char usage[64];
        snprintf(usage, sizeof usage, "%s %s", entries[i].name, entries[i].arguments);
        printf("  %-38s %s\n", usage, entries[i].summary);
    }
    printf("\n`coldplane COMMAND --help` has the flags and examples; `coldplane --show-config`\n"
           "prints every setting. Exit codes: 0 ok, 1 usage, 2 not found, 3 refused, 4 corrupt,\n"
           "5 I/O, 6 device or memory, 7 proof failed.\n");
}

enum kv_err cmd_version(struct cmd *cmd, struct kv_diag *diag) {
    (void)diag;
    if (cmd->result != NULL) {
        json_text(cmd->result, "version", VERSION);
        cJSON_AddNumberToObject(cmd->result, "store_format", STORE_FORMAT_VERSION);
        cJSON_AddNumberToObject(cmd->result, "record_format", RECORD_VERSION);
        cJSON_AddNumberToObject(cmd->result, "image_format", IMAGE_VERSION);
        cJSON_AddNumberToObject(cmd->result, "export_format", EXPORT_VERSION);
        cJSON_AddNumberToObject(cmd->result, "receipt_schema", RECEIPT_VERSION);
    } else {
        printf("coldplane " VERSION ": store format %d, records %d, image %d, exports %d, "
               "receipts %d\n",
               STORE_FORMAT_VERSION, RECORD_VERSION, IMAGE_VERSION, EXPORT_VERSION,
               RECEIPT_VERSION);
    }
    return KV_OK;
}

enum kv_err cmd_lookup(const char *name, const struct cmd_entry **entry_out, struct kv_diag *diag) {
    char names[600] = "";
    size_t at = 0;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        if (strcmp(entries[i].name, name) == 0) {
            *entry_out = &entries[i];
            return KV_OK;
        }
        int wrote =
            snprintf(names + at, sizeof names - at, "%s%s", i > 0 ? ", " : "", entries[i].name);
        at += wrote > 0 && at + (size_t)wrote < sizeof names ? (size_t)wrote : 0;
    }
    return kv_diag_set(diag, KV_ERR_INVALID,
                       "%.60s: no such command; `coldplane help` lists them: %s", name, names);
}

static void add_help(cJSON *list, const struct cmd_entry *entry) {
    cJSON *item = cJSON_CreateObject();
    json_text(item, "name", entry->name);
    json_text(item, "arguments", entry->arguments);
    json_text(item, "summary", entry->summary);
    json_text(item, "help", entry->help);
    json_text(item, "examples", entry->examples);
    cJSON_AddItemToArray(list, item);
}

void cmd_give_help(struct cmd *cmd, const struct cmd_entry *entry) {
    if (cmd->result == NULL) {
        const char *action = entry != NULL ? action_of(cmd, entry) : NULL;
        if (action != NULL)
            print_action(entry, action);
        else if (entry != NULL)
            print_help(entry);
        else
            print_overview();
        return;
    }
    cJSON *list = cJSON_AddArrayToObject(cmd->result, "commands");
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++)
        if (entry == NULL || entry == &entries[i])
            add_help(list, &entries[i]);
}

enum kv_err cmd_help(struct cmd *cmd, struct kv_diag *diag) {
    const struct cmd_entry *entry = NULL;
    const char *name = cmd_word(cmd, 0);
    const size_t count = sizeof entries / sizeof entries[0];
    if (name != NULL && cmd->result == NULL && strcmp(name, "man") == 0) {
        cmd_manual_page(entries, count, stdout);
        return KV_OK;
    }
    if (name != NULL && cmd->result == NULL && strcmp(name, "bash") == 0) {
        cmd_manual_completion(entries, count, stdout);
        return KV_OK;
    }
    enum kv_err err = name != NULL ? cmd_lookup(name, &entry, diag) : KV_OK;
    if (err == KV_OK)
        cmd_give_help(cmd, entry);
    return err;
}
