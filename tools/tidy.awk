# tools/tidy.awk - the style rules that a program can read from the text of one source file.
#
# Responsible for: header comments, line, function, file and parameter-list length, imports against
# tools/layers.txt, words that belong in one place only. Prints path:line: rule; exits 1 if any.
# Not responsible for: layout (clang-format), or rules over several files (tools/check.sh).
#
# Usage: LC_ALL=C awk -f tools/tidy.awk FILES, from the root, on files as clang-format leaves them.
# A line with `tidy-allow: RULE reason` waives RULE (function-length, file-length, parameters, wait,
# random, print) on that line and the next; for file-length anywhere in the file.

function complain(rule) {
    printf "%s:%d: %s\n", FILENAME, FNR, rule
    bad = 1
}

# A pattern for a call of one of these names that is neither a member nor part of a longer name.
function calls(names) { return "(^|[^A-Za-z0-9_>.])(" names ") *\\(" }

function waived(rule) { return (rule in waiver) && FNR - waiver[rule] <= 1 }

function columns(text) {
    gsub(/[\200-\277]/, "", text) # UTF-8 continuation bytes take no column
    return length(text)
}

# The line without comments, with empty strings and characters; comment text goes to `remark`.
function code_of(line,    out, at, token) {
    out = ""; remark = ""
    while (line != "") {
        if (in_comment) {
            at = index(line, "*/")
            if (!at) { remark = remark line; return out }
            remark = remark substr(line, 1, at - 1)
            line = substr(line, at + 2)
            in_comment = 0
            continue
        }
        if (!match(line, /"|'|\/\*|\/\//)) return out line
        out = out substr(line, 1, RSTART - 1)
        token = substr(line, RSTART, RLENGTH)
        line = substr(line, RSTART + RLENGTH)
        if (token == "/*") { in_comment = 1; continue }
        if (token == "//") { remark = remark line; return out }
        if (token == "\"") {
            text_seen = match(line, /^([^"\\]|\\.)*"/) ? substr(line, 1, RLENGTH) : line
            texts = texts " " text_seen
            out = out "\"\""
        } else {
            match(line, /^([^'\\]|\\.)*'/)
            out = out "' '"
        }
        line = RLENGTH > 0 ? substr(line, RLENGTH + 1) : ""
    }
    return out
}

# Parameters of the declaration: commas in the outermost parentheses that end it.
function parameter_count(text,    i, c, depth, commas, count) {
    sub(/__attribute__.*$/, "", text)
    depth = 0; commas = 0; count = 0
    for (i = 1; i <= length(text); i++) {
        c = substr(text, i, 1)
        if (c == "(" && depth++ == 0) commas = 0
        if (c == ")" && --depth == 0 && commas + 1 > count) count = commas + 1
        if (c == "," && depth == 1) commas++
    }
    return count
}

function complain_file(rule) {
    print previous ": " rule
    bad = 1
}

function end_of_file() {
    if (previous == "") return
    if (lines > 800 && !long_allowed) complain_file("file longer than 800 lines")
    if (!was_code) return
    if (!said_for) complain_file("header comment lacks 'Responsible for:'")
    if (!said_not) complain_file("header comment lacks 'Not responsible for:'")
    if (previous ~ /\.h$/ && !said_threads) complain_file("header comment lacks 'Threads:'")
    if (previous ~ /\.h$/ && !said_units) complain_file("header comment lacks 'Units:'")
    if (depth != 0) complain_file("braces do not balance for tools/tidy.awk")
}

BEGIN {
    while ((getline line < "tools/layers.txt") > 0) {
        if (line ~ /^#/) continue
        count = split(line, field)
        for (i = 2; i <= count; i++) allowed[field[1]] = allowed[field[1]] " " field[i]
    }
    memory_call = calls("malloc|calloc|realloc|reallocarray|free|strdup|strndup|asprintf|" \
                        "vasprintf|posix_memalign|aligned_alloc|memalign")
    unsafe_call = calls("strcpy|strcat|sprintf|vsprintf|gets|strtok|alloca|longjmp|setjmp|atoi|" \
                        "atol|atof|mktemp|tmpnam")
    exit_call = calls("exit|_exit|_Exit|quick_exit|abort|printf|vprintf|fprintf|vfprintf|puts|" \
                      "fputs|putchar|putc|fputc|perror")
    environment_call = calls("getenv|secure_getenv|setenv|putenv")
    time_call = calls("time|gettimeofday|clock_gettime|clock|timespec_get|ftime")
    wait_call = calls("sleep|usleep|nanosleep|clock_nanosleep")
    random_call = calls("rand|srand|random|srandom|rand_r|drand48|lrand48|getrandom|getentropy|" \
                        "arc4random")
    planted = "^(tools/tidy\\.awk|tests/test_tidy\\.c)$" # these name what they look for
    cuda_home = "^kernels/cuda/|^engine/device/device_cuda(_lanes)?\\.[ch]$|^tests/gpu_"
}

FNR == 1 {
    end_of_file()
    previous = FILENAME
    split(FILENAME, part, "/")
    module = part[1]
    was_code = is_code = FILENAME ~ /\.(c|h|cu|cuh)$/
    said_for = said_not = said_threads = said_units = in_comment = depth = lines = long_allowed = 0
    head_open = 1; include_count = 0; declaration = ""; body_first = 0; in_macro = 0
    conditions = 0
    for (rule in waiver) delete waiver[rule]
    if (is_code && index($0, "/* " FILENAME " - ") != 1)
        complain("file must open with '/* " FILENAME " - one phrase.'")
}

{ lines++ }
FNR <= 2 && index($0, "# " FILENAME " - ") == 1 { script_named = FILENAME }
FNR == 2 && !is_code && script_named != FILENAME {
    complain("script must open with '# " FILENAME " - one phrase.'")
}

columns($0) > 100 { complain("line longer than 100 columns") }
/[ \t]$/ { complain("white space at the end of the line") }
/tidy-allow: / && is_code {
    match($0, /tidy-allow: [a-z-]+/)
    rule = substr($0, RSTART + 12, RLENGTH - 12)
    waiver[rule] = FNR
    if (rule == "file-length") long_allowed = 1
    if (substr($0, RSTART + RLENGTH) !~ /[a-z]+ [a-z]+/) complain("tidy-allow without a reason")
}
/(TODO|FIXME)/ && FILENAME !~ planted && !/(TODO|FIXME)\(#[0-9]+\)/ {
    complain("TODO needs an issue: TODO(#12)")
}
/NDEBUG/ && FILENAME !~ planted { complain("assert stays on") }

!is_code { next }

head_open {
    if (/[^t] responsible for:|^ \* Responsible for:|- Responsible for:/) said_for = 1
    if (/Not responsible for:/) said_not = 1
    if (/Threads:/) said_threads = 1
    if (/Units:/) said_units = 1
    if (/\*\//) head_open = 0
}

/^#include/ {
    include_count++
    if (match($0, /"[^"]*"/)) {
        path = substr($0, RSTART + 1, RLENGTH - 2)
        fine = 0
        count = split(allowed[module], may, " ")
        for (i = 1; i <= count; i++)
            if (path == may[i] || (may[i] ~ /\/$/ && index(path, may[i]) == 1)) fine = 1
        if (!fine) complain("layer: " module "/ may not include " path)
    }
    if (/<(cuda|cublas|nv|driver_types)/ && FILENAME !~ cuda_home)
        complain("CUDA headers belong to kernels/cuda/ and engine/device/device_cuda*")
    if (include_count == 1) first_include = path
    next
}

{
    texts = ""
    code = code_of($0)
    outside = module != "tools" && module != "tests"
}

remark ~ /;[ \t]*$/ && remark ~ /[=()].*;[ \t]*$/ && remark !~ /[a-z] [a-z]+ [a-z]/ {
    complain("commented-out code")
}
code ~ memory_call && FILENAME != "store/base/alloc.c" && module != "tests" {
    complain("memory comes from struct kv_alloc")
}
code ~ unsafe_call { complain("banned call") }
code ~ exit_call && outside && !waived("print") {
    complain("exit, abort and print belong to tools/")
}
code ~ environment_call && FILENAME != "tools/config.c" && module != "tests" {
    complain("the environment is read in tools/config.c only")
}
code ~ time_call && FILENAME != "store/base/clock.c" && module != "tests" {
    complain("time comes from store/base/clock.h")
}
code ~ wait_call && !waived("wait") {
    complain("no sleeps: wait for the event, or waive with a reason")
}
(code ~ random_call || texts ~ /\/dev\/u?random/) && !waived("random") {
    complain("randomness comes from a printed seed")
}
code ~ /(^|[^A-Za-z0-9_])goto / && code !~ /goto done;/ { complain("the only label is done") }
code ~ /^[ \t]*[A-Za-z_][A-Za-z0-9_]*:[ \t]*$/ && code !~ /^[ \t]*(default|done):/ {
    complain("the only label is done")
}
code ~ /(^|[^A-Za-z0-9_])typedef / && code !~ /\(\*/ && FILENAME !~ /\.cuh?$/ {
    complain("typedef is for function pointers only")
}

# Braces: function bodies are what opens at depth 0 after a ')' and ends at depth 0. Each branch of
# an #if starts from the depth in front of it.
/^#if/ { depth_at[++conditions] = depth }
/^#el/ { depth = depth_at[conditions] }
/^#endif/ { conditions-- }
/^#/ || in_macro {
    in_macro = /\\$/
    next
}
{
    rest = code
    while (match(rest, /[{};]/)) {
        token = substr(rest, RSTART, 1)
        if (depth == 0) declaration = declaration " " substr(rest, 1, RSTART - 1)
        rest = substr(rest, RSTART + 1)
        if (token == "{") {
            if (depth == 0 && declaration ~ /\)[ \t]*$/) {
                body_first = FNR
                if (parameter_count(declaration) > 6 && !waived("parameters"))
                    complain("more than 6 parameters")
                long_waived = waived("function-length")
            }
            if (depth == 0 && declaration ~ /extern *""[ \t]*$/) continue
            depth++
        } else if (token == "}") {
            if (depth > 0) depth--
            if (depth == 0) {
                if (body_first && FNR - body_first - 1 > 70 && !long_waived)
                    complain("function longer than 70 lines (" FNR - body_first - 1 ")")
                body_first = 0
                declaration = ""
            }
        } else if (depth == 0) {
            if (declaration ~ /\)[ \t]*$|__attribute__/ && declaration !~ /=|[sS]tatic_assert/ &&
                parameter_count(declaration) > 6 && !waived("parameters"))
                complain("more than 6 parameters")
            declaration = ""
        }
    }
    if (depth == 0) declaration = declaration " " rest
}

END {
    end_of_file()
    exit bad
}
