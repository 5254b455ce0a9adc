/* tools/cmd_manual.c - the man page and the bash completion, made from the help text.
 *
 * Responsible for: what cmd_manual.h promises.
 * Not responsible for: the text itself.
 */
#include "tools/cmd_manual.h"

#include <string.h>

/* One line, or several, of text that roff must take as it stands. */
static void print_roff(const char *text, FILE *out) {
    int begins = 1;
    for (const char *at = text; *at != 0; at++) {
        if (begins && (*at == '.' || *at == '\''))
            fputs("\\&", out);
        begins = *at == '\n';
        if (*at == '\\')
            fputs("\\e", out);
        else if (*at == '-')
            fputs("\\-", out);
        else
            fputc(*at, out);
    }
}

static void print_block(const char *text, FILE *out) {
    fputs(".nf\n", out);
    print_roff(text, out);
    if (text[0] != 0 && text[strlen(text) - 1] != '\n')
        fputc('\n', out);
    fputs(".fi\n", out);
}

static void print_flags(unsigned groups, FILE *out) {
    char text[16384] = "";
    FILE *memory = fmemopen(text, sizeof text - 1, "w");
    if (memory == NULL)
        return;
    config_help(groups, memory);
    fclose(memory);
    print_block(text, out);
}

void cmd_manual_page(const struct cmd_entry *entries, size_t count, FILE *out) {
    fputs(
        ".TH COLDPLANE 1\n.SH NAME\ncoldplane \\- keeps long chat sessions, puts them to sleep on "
        "disk and wakes them with proof\n.SH SYNOPSIS\n.B coldplane\n.I COMMAND\n[arguments] "
        "[flags]\n.SH COMMANDS\n",
        out);
    for (size_t i = 0; i < count; i++) {
        const struct cmd_entry *entry = &entries[i];
        fprintf(out, ".SS coldplane %s ", entry->name);
        print_roff(entry->arguments, out);
        fputc('\n', out);
        print_roff(entry->summary, out);
        fputs(".\n.PP\n", out);
        print_block(entry->help, out);
        if (entry->groups != 0) {
            fputs(".PP\nFlags:\n", out);
            print_flags(entry->groups, out);
        }
        if (entry->examples[0] != 0) {
            fputs(".PP\nExamples:\n", out);
            print_block(entry->examples, out);
        }
    }
    fputs(".SH FLAGS OF EVERY COMMAND\n", out);
    print_flags(CONFIG_COMMON, out);
    fputs(".SH EXIT STATUS\n0 ok, 1 usage, 2 not found, 3 refused, 4 corrupt, 5 I/O, 6 device or "
          "memory, 7 proof failed.\n.SH ENVIRONMENT\n.B COLDPLANE_HOME\nthe folder of settings, "
          "store, model and receipts; ~/.coldplane without it.\n",
          out);
}

/* "plant|check|ls NAME" has words to choose from, "NAME[@TAG]" names a session. */
static void print_words(const char *arguments, FILE *out) {
    size_t length = strcspn(arguments, " ");
    if (memchr(arguments, '|', length) == NULL || arguments[0] == '[' || arguments[0] == 'F')
        return;
    for (size_t i = 0; i < length; i++)
        fputc(arguments[i] == '|' ? ' ' : arguments[i], out);
}

static void print_flag_words(unsigned groups, FILE *out) {
    char text[16384] = "";
    FILE *memory = fmemopen(text, sizeof text - 1, "w");
    if (memory == NULL)
        return;
    config_help(groups | CONFIG_COMMON, memory);
    fclose(memory);
    for (const char *line = text; *line != 0; line += strcspn(line, "\n"), line += *line != 0) {
        const char *flag = strstr(line, "--");
        if (flag != NULL)
            fprintf(out, "%.*s ", (int)strcspn(flag, " \n"), flag);
    }
}

static const char completion_end[] =
    "    esac\n"
    "    if [[ $cur == -* ]]; then\n"
    "        mapfile -t COMPREPLY < <(compgen -W \"$flags\" -- \"$cur\")\n"
    "    elif [[ -n $words && $COMP_CWORD -eq 2 ]]; then\n"
    "        mapfile -t COMPREPLY < <(compgen -W \"$words\" -- \"$cur\")\n"
    "    elif [[ -n $names && ( $COMP_CWORD -eq 2 || -n $words || $prev == --session ) ]]; then\n"
    "        local name\n"
    "        while IFS= read -r name; do\n"
    "            [[ $name == \"$cur\"* ]] && COMPREPLY+=(\"$(printf %q \"$name\")\")\n"
    "        done < <(coldplane ls 2>/dev/null | awk 'NR == 1 { at = index($0, \"name\") }\n"
    "            NR > 1 { n = substr($0, at); sub(/  \\(.*/, \"\", n); print n }')\n"
    "    fi\n"
    "}\n"
    "complete -o default -F _coldplane coldplane\n";

void cmd_manual_completion(const struct cmd_entry *entries, size_t count, FILE *out) {
    fputs("# bash completion of coldplane; `coldplane help bash` makes it\n_coldplane() {\n"
          "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n"
          "    local words='' flags='' names=''\n    COMPREPLY=()\n"
          "    if [[ $COMP_CWORD -eq 1 ]]; then\n"
          "        mapfile -t COMPREPLY < <(compgen -W \"",
          out);
    for (size_t i = 0; i < count; i++)
        fprintf(out, "%s ", entries[i].name);
    fputs("\" -- \"$cur\")\n        return\n    fi\n    case ${COMP_WORDS[1]} in\n", out);
    for (size_t i = 0; i < count; i++) {
        fprintf(out, "    %s) words='", entries[i].name);
        print_words(entries[i].arguments, out);
        fputs("' flags='", out);
        print_flag_words(entries[i].groups, out);
        int names = strstr(entries[i].arguments, "NAME") != NULL ||
                    (entries[i].groups & CONFIG_SESSION) != 0;
        fprintf(out, "' names=%s ;;\n", names ? "yes" : "");
    }
    fputs(completion_end, out);
}
