/* tools/cmd_manual.h - the man page and the bash completion, made from the help text.
 *
 * Responsible for: putting what `help` says into the forms that man and bash read.
 * Not responsible for: the text itself (cmd_help.c, config.c).
 *
 * Threads: pure; printing to one stream.
 * Units: none.
 */
#ifndef TOOLS_CMD_MANUAL_H
#define TOOLS_CMD_MANUAL_H

#include "tools/cmd.h"

#include <stdio.h>

void cmd_manual_page(const struct cmd_entry *entries, size_t count, FILE *out);
void cmd_manual_completion(const struct cmd_entry *entries, size_t count, FILE *out);

#endif
