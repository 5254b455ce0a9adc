/* tests/support_nine_file.h - what the demonstration was asked for and has found, and its files.
 *
 * Responsible for: wishes, results, one JSON file per recipe and an overview.
 * Not responsible for: measuring, the table (nine.c), pictures (tools/plot_users.py).
 *
 * Threads: one.
 * Units: as the structs that they are made of; in files the unit is the end of a name.
 */
#ifndef TESTS_SUPPORT_NINE_FILE_H
#define TESTS_SUPPORT_NINE_FILE_H

#include "tests/support_nine_curve.h"
#include "tests/support_nine_save.h"
#include "tests/support_nine_wake.h"

enum { NINE_GOALS_MAX = 64 };

/* Parts of the story, in its order. A run of some of them only shows less than it seems to: it says
 * in the table and in every file which they were. */
enum nine_part {
    NINE_PART_FIT,
    NINE_PART_PREFILL,
    NINE_PART_CURVES, /* without it only what saves and life need of the last recipe */
    NINE_PART_SAVES,
    NINE_PART_DISK, /* wakes */
    NINE_PART_MEMORY,
    NINE_PART_LIFE,
    NINE_PARTS,
    NINE_PARTS_ALL = (1 << NINE_PARTS) - 1
};
const char *nine_part_name(enum nine_part part);

struct nine_wish {
    struct nine_settings settings;
    uint32_t users, sessions, steps, fit_tokens;
    double seconds;
    const char *recipes, *out, *commit, *device, *memory, *pool, *part_names;
    int quick, gpu;
    uint32_t parts; /* bits */
};

enum nine_sense { NINE_AT_LEAST, NINE_AT_MOST };
struct nine_goal {
    char what[96];
    double goal, value;
    enum nine_sense sense;
    int hit;
};

struct nine_results {
    const struct nine_wish *wish;
    struct nine_fit fits[NINE_RECIPES];
    struct nine_curve curves[NINE_RECIPES];
    uint32_t curve_count;
    double copy_rate; /* bytes a second; 0: not measured */
    struct nine_prefill prefill;
    struct nine_wakes wakes;
    int woken;
    struct nine_life life;
    int lived;
    struct nine_saves saves;
    int saved;
    struct engine_slots slots;
    uint64_t disk_free, disk_need, disk_growth; /* growth: of the life, at most about */
    struct nine_goal goals[NINE_GOALS_MAX];
    uint32_t goal_count;
    int wrong, missed;
    double begun;
};

/* wish->out/nine_RECIPE.json and nine_overview.json; 0, and said so: they cannot be written. */
int nine_write_files(struct nine_results *results, const struct nine *nine);

#endif
