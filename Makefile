# Makefile - builds, tests, checks and installs coldplane; `make help` lists the targets.
#
# Responsible for: flags, archives (one per folder, linked in import order), programs, targets.
# Not responsible for: packages and the model (tools/setup.sh), style rules (tools/tidy.awk).
#
# CONFIG=release|debug|asan|tsan picks flags and build folder, so switching never needs a clean.
# CUDA=0|1 leaves out or adds kernels/cuda; 1 where nvcc is found. V=1 shows whole commands.
# Every output is written under a temporary name and renamed: two makes may share a folder.

CONFIG ?= release
NVCC   ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
CUDA   ?= $(if $(NVCC),1,0)
PREFIX ?= /usr/local
KILLS  ?= 20
STRIDE ?= 1
SECONDS ?= 60
GPU_DEMO_OUT = $(or $(OUT),tests/results/nine)
B      := build/$(CONFIG)
CC     := $(if $(filter fuzz,$(CONFIG)),clang,gcc)
Q      := $(if $(V),,@)

ifeq ($(filter $(CONFIG),release debug asan tsan fuzz),)
$(error CONFIG=$(CONFIG) is not known: use release, debug, asan or tsan)
endif

# No -march=native and no fast-math: the same sources give the same numbers on every machine.
# Asserts stay on in every configuration.
WARN := -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla \
        -Wno-format-truncation
CFLAGS_release := -O2 -g
CFLAGS_debug   := -O1 -g
CFLAGS_asan    := -O2 -g -fno-omit-frame-pointer -fsanitize=address,undefined \
                  -fno-sanitize-recover=all
CFLAGS_tsan    := -O1 -g -fsanitize=thread
CFLAGS_fuzz    := -O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all \
                  -fsanitize=address,undefined,fuzzer-no-link -Wno-unknown-warning-option \
                  -include tests/support_clang.h
CFLAGS   := -std=c11 -D_GNU_SOURCE $(WARN) -ffp-contract=off -fno-math-errno $(CFLAGS_$(CONFIG))
CPPFLAGS := -I. -I$B/gen
AVX2     := -mavx2 -mfma -mf16c
AVX512   := -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16 $(AVX2)
NVFLAGS  := -std=c++17 -O2 -lineinfo --Werror all-warnings -Xcompiler -Wall,-Wextra \
            -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a
LIBRARY  := $B/libcoldplane.a $B/gen/libs
TOOLS_LIBS := -lcjson -ledit -lmicrohttpd
LDLIBS   := -luring -llmdb -lzstd -lxxhash -lsodium -lpcre2-8 -lcjson -lmicrohttpd -ledit \
            -lpthread -lm

# Sources by folder. A folder or program that is not there yet is simply empty.
PROGRAM_SRC  := $(wildcard tools/coldplane.c tools/coldplaned.c)
SRC_tools    := $(filter-out $(PROGRAM_SRC),$(wildcard tools/*.c))
SRC_snapshot := $(wildcard snapshot/*.c)
SRC_restore  := $(wildcard restore/*.c)
SRC_engine   := $(wildcard engine/*.c engine/model/*.c engine/kv/*.c engine/device/*.c)
SRC_kernels  := $(wildcard kernels/*.c kernels/host/*.c)
SRC_store    := $(wildcard store/*.c store/base/*.c)
CU           := $(wildcard kernels/cuda/*.cu)

ifeq ($(CUDA)$(if $(CU),,0),1)
CPPFLAGS    += -isystem $(patsubst %/bin/nvcc,%/include,$(NVCC))
CU_OBJ      := $(CU:%.cu=$B/%.cu.o)
SRC_engine  := $(filter-out engine/device/device_none.c,$(SRC_engine))
LDLIBS      += -L$(patsubst %/bin/nvcc,%/lib64,$(NVCC)) -lcudart_static -ldl -lrt -lstdc++
else
SRC_engine  := $(filter-out engine/device/device_cuda%.c,$(SRC_engine))
SRC_kernels += kernels/cuda/without_cuda.c
endif

# tests/: these are programs; any other file is shared by them.
TEST_SRC    := $(wildcard tests/test_*.c)
FUZZ_SRC    := $(wildcard tests/fuzz_*.c)
HELPER_SRC  := $(wildcard tests/demo.c tests/sabotage*.c tests/kill*.c tests/bench*.c \
                          tests/sweep.c tests/sim.c tests/flips.c tests/branches.c \
                          tests/stage_http.c tests/crowd.c tests/nine.c)
GPU_SRC     := $(wildcard tests/gpu_*.c)
SRC_testing := $(wildcard tests/testing.c)

# ld reads each archive once, in this order, so a call that points up does not link.
LAYERS   := tools snapshot restore engine kernels store
ARCHIVES := $(foreach a,testing $(LAYERS),$(if $(SRC_$a),$a))
OBJ_of    = $(SRC_$1:%.c=$B/%.o) $(if $(filter kernels,$1),$(CU_OBJ))
PRODUCT_OBJ := $(foreach a,$(LAYERS),$(call OBJ_of,$a)) \
               $(PROGRAM_SRC:%.c=$B/%.o)

PROGRAMS      := $(PROGRAM_SRC:tools/%.c=$B/%)
TEST_PROGRAMS := $(TEST_SRC:%.c=$B/%)
ALL_TESTS     := $(TEST_PROGRAMS) $(HELPER_SRC:%.c=$B/%)
LONG_TESTS    := $(patsubst %.c,%,$(notdir $(wildcard tests/sweep.c tests/sim.c tests/flips.c \
                                                      tests/branches.c)))
TESTS         ?= $(notdir $(TEST_PROGRAMS)) $(LONG_TESTS)

.PHONY: all help demo crowd gpu-demo test test-programs gpu-programs check check-twins sanitize \
        threads bench test-kill sweep sim fuzz fuzz-programs test-clients test-page gpu-test \
        gpu-bench install uninstall deb clean setup print-link FORCE
.SECONDARY:
.DELETE_ON_ERROR:

all: $(PROGRAMS) $(if $(PROGRAMS),,$(ARCHIVES:%=$B/%.a))

help:
	@echo 'make              build the programs into $B/'
	@echo 'make demo         set up, build, then twelve sessions sleep, wake and are proven'
	@echo '                  (DEMO_TOKENS=2048, MODEL=path)'
	@echo 'make crowd        forty chats at one daemon with room for nine, kill -9 and SIGTERM'
	@echo '                  (CROWD_TOKENS=1536 CROWD_CLIENTS=4 CROWD_SEED= OUT=file.json)'
	@echo 'make gpu-demo     nine users of synth:8b in one batch, more asleep; needs an NVIDIA GPU'
	@echo '                  (DEMO_TOKENS= DEMO_USERS=9 DEMO_SESSIONS=10 DEMO_SECONDS= DEMO_RECIPES='
	@echo '                  DEMO_STORE=folder OUT=folder COMMIT=)'
	@echo 'make test         set up, build, run every test (TESTS="test_a test_b", QUICK=1)'
	@echo 'make check        style, imports, mutable globals, layout'
	@echo 'make check-twins  every BREAK_ switch must make its test fail (TWINS="test_a sweep")'
	@echo 'make sanitize     all tests under ASan and UBSan'
	@echo 'make threads      the tests in which threads meet, under the thread sanitizer'
	@echo 'make test-clients the openai package and another client from PyPI against the HTTP side'
	@echo 'make test-page    the status page in headless Chromium (SHOT=picture.png)'
	@echo 'make test-kill    real SIGKILLs during saves (KILLS=20)'
	@echo 'make sweep        every power cut and every failing call of one life (STRIDE=1)'
	@echo 'make sim          random lives with faults on a virtual clock (SECONDS=60 SEED=)'
	@echo 'make fuzz         libFuzzer over everything read from disk (SECONDS=60; needs clang)'
	@echo 'make bench        speed and quality figures'
	@echo 'make gpu-test     kernels against their twins, sanitizers, the engine (GPU_DEBS=, MODEL=)'
	@echo 'make gpu-bench    speed of kernels and of a decode step beside the goals; both need only'
	@echo '                  CUDA toolkit, gcc and a GPU and write to tests/results/'
	@echo 'make setup        packages and the default model'
	@echo 'make install      programs, man pages, unit, library (DESTDIR=, PREFIX=/usr/local)'
	@echo 'make uninstall    removes exactly what was installed there'
	@echo 'make deb          a Debian package in $B/'
	@echo 'make clean        remove build/'
	@echo 'Variables: CONFIG=release|debug|asan|tsan CUDA=0|1 V=1'
	@echo '           WIP=1 leaves files that do not compile out of their archive'

# --- compiling and linking

# Changing a flag rebuilds; touching this file does not.
$B/gen/flags: FORCE
	@mkdir -p $(@D); printf '%s\n' '$(CC) $(CFLAGS) $(CPPFLAGS) $(AVX2) $(AVX512) $(NVFLAGS)' \
	    >$@.$$$$; if cmp -s $@.$$$$ $@; then rm -f $@.$$$$; else mv -f $@.$$$$ $@; fi

# The numerics id (DESIGN section 12) hashes what decides the bits of a logit.
$B/gen/build_id.h: FORCE
	@mkdir -p $(@D); { \
	echo '/* build_id.h - written by the Makefile: which sources and compiler made this program. */'; \
	echo "#define BUILD_SOURCES_DIGEST \"$$(find kernels engine/model -name '*.[ch]' \
	    -o -name '*.cu' -o -name '*.cuh' 2>/dev/null | LC_ALL=C sort | xargs -r sha256sum | \
	    sha256sum | cut -d' ' -f1)\""; \
	version=$$($(CC) -dumpfullversion -dumpversion); \
	echo "#define BUILD_COMPILER \"gcc $$version $(CFLAGS) $(AVX2)\""; \
	echo "#define BUILD_CUDA_FLAGS \"$(NVFLAGS)\""; } >$@.$$$$; \
	if cmp -s $@.$$$$ $@; then rm -f $@.$$$$; else mv -f $@.$$$$ $@; fi

# The status page as a C string, and a content security policy that lets run what is in it alone.
page_digest = 'sha256-$$({ echo; sed -n '1,/^<$1>$$/d; /^<\/$1>$$/q; p' $<; } | sha256sum | \
    cut -c 1-64 | tr a-f A-F | basenc -d --base16 | base64)'
$B/gen/http_page_html.h: tools/http_page.html
	@mkdir -p $(@D); { \
	echo '/* http_page_html.h - written by the Makefile: tools/http_page.html. */'; \
	echo "#define HTTP_PAGE_POLICY \"default-src 'none'; connect-src 'self'; \
	img-src data:; base-uri 'none'; \
	form-action 'none'; frame-ancestors 'none'; script-src $(call page_digest,script); \
	style-src $(call page_digest,style)\""; \
	echo '#define HTTP_PAGE_HTML \'; \
	sed 's/\\/\\\\/g; s/"/\\"/g; s/^/    "/; s/$$/\\n" \\/' $<; echo '    ""'; } >$@.$$$$; \
	mv -f $@.$$$$ $@
$B/tools/http_reply.o: $B/gen/http_page_html.h

# The script of bench attention as a C string.
$B/gen/gpu_peer_py.h: tools/gpu_peer.py
	@mkdir -p $(@D); { \
	echo '/* gpu_peer_py.h - written by the Makefile: tools/gpu_peer.py. */'; \
	echo '#define GPU_PEER_PY \'; \
	sed 's/\\/\\\\/g; s/"/\\"/g; s/^/    "/; s/$$/\\n" \\/' $<; echo '    ""'; } >$@.$$$$; \
	mv -f $@.$$$$ $@
$B/tools/torch_peer.o: $B/gen/gpu_peer_py.h

# Asked once for a build folder, so that a machine without the packages gets one sentence.
HEADERS := liburing lmdb zstd xxhash sodium cjson/cJSON microhttpd histedit
$B/gen/packages:
	@mkdir -p $(@D); command -v $(CC) >/dev/null || { \
	    echo '$(CC) is missing: `make setup` installs the packages' >&2; exit 1; }; \
	for header in $(HEADERS) pcre2; do \
	    printf '#define PCRE2_CODE_UNIT_WIDTH 8\n#include <stdio.h>\n#include <%s.h>\n' $$header | \
	    $(CC) $(CPPFLAGS) -D_GNU_SOURCE -E - >/dev/null 2>&1 || { echo \
	    "<$$header.h> is missing: \`make setup\` installs the packages" >&2; exit 1; }; \
	done; touch $@

$B/%_avx2.o: SIMD := $(AVX2)
$B/%_avx512.o: SIMD := $(AVX512)

$B/%.o: %.c $B/gen/flags | $B/gen/build_id.h $B/gen/packages
	@mkdir -p $(@D); $(if $(V),,echo 'CC   $<')
	$(Q)$(CC) $(CPPFLAGS) $(CFLAGS) $(SIMD) -MMD -MP -MT $@ -MF $@.$$$$.d -c -o $@.$$$$ $< && \
	    mv -f $@.$$$$.d $(@:.o=.d) && mv -f $@.$$$$ $@ || \
	    { rm -f $@ $@.$$$$ $@.$$$$.d; $(if $(WIP),echo 'WIP: left out $<',exit 1); }

$B/%.cu.o: %.cu $B/gen/flags
	@mkdir -p $(@D); $(if $(V),,echo 'NVCC $<')
	$(Q)$(NVCC) $(NVFLAGS) -I. -MMD -MP -MT $@ -MF $(@:.o=.d) -c -o $@ $<

# The list makes an archive forget a file that was removed.
$B/gen/%.list: FORCE
	@mkdir -p $(@D); printf '%s\n' $(sort $(call OBJ_of,$*)) >$@.$$$$; \
	if cmp -s $@.$$$$ $@; then rm -f $@.$$$$; else mv -f $@.$$$$ $@; fi

define archive_rule
$B/$1.a: $$(call OBJ_of,$1) $B/gen/$1.list
	$$(if $$(V),,@echo 'AR   $$@')
	$$(Q)rm -f $$@.$$$$$$$$; ar rcs $$@.$$$$$$$$ $$$$(ls $$(call OBJ_of,$1) 2>/dev/null) && \
	    mv -f $$@.$$$$$$$$ $$@
endef
$(foreach a,$(ARCHIVES),$(eval $(call archive_rule,$a)))

# A test links the archives of the folders that it includes and of what those may import, and the
# shared files tests/NAME.c whose header it includes (four levels deep); nothing else, so a test of
# store/ that needs engine/ does not link.
INCLUDES := $(shell grep -oHE '^.include "[a-z_]+/[a-z0-9_]+' $(wildcard tests/*.[ch]) | \
              grep -v 'tests/testing$$' | \
              sed 's,:.include ",:,; /:tests/!s,/[a-z0-9_]*$$,,' | sort -u)
NEED_store    := store
NEED_kernels  := kernels
NEED_engine   := engine kernels store
NEED_snapshot := snapshot $(NEED_engine)
NEED_restore  := restore $(NEED_engine)
NEED_tools    := tools snapshot restore $(NEED_engine)
includes_of    = $(patsubst $1:%,%,$(filter $1:%,$(INCLUDES)))
shared_by      = $(patsubst tests/%,%,$(filter tests/%,$(includes_of)))
and_theirs     = $(sort $1 $(foreach s,$1, \
                     $(call shared_by,tests/$s.c) $(call shared_by,tests/$s.h)))
# With theirs until no more come.
closed         = $(if $(filter-out $1,$2),$(call closed,$2,$(call and_theirs,$2)),$2)
shared_of      = $(call closed,,$(shared_by))
files_of       = $1 $(foreach s,$(call shared_of,$1),tests/$s.c tests/$s.h)
folders_of     = $(sort $(foreach f,$(call files_of,$1), \
                     $(filter-out tests/%,$(call includes_of,$f))))
objects_of     = $(patsubst %.c,$B/%.o,$(wildcard $(filter-out $1, \
                     $(filter %.c,$(call files_of,$1)))))
archives_of    = $(patsubst %,$B/%.a,$(filter testing store \
                     $(foreach f,$(call folders_of,$1),$(NEED_$f)),$(ARCHIVES)))

define link
$(if $(V),,@echo 'LD   $@')
$(Q)$(CC) $(CFLAGS) -o $@.$$$$ $(filter %.o,$^) $(filter %.a,$^) $(WRAP_FLAGS) \
    -Wl,--as-needed $1 $(LDLIBS) && \
    mv -f $@.$$$$ $@ || { rm -f $@.$$$$; exit 1; }
endef

# A program with the faulty index gets every call to the index sent through it.
WRAP_CALLS  := pread pwrite fdatasync io_uring_submit io_uring_wait_cqe_timeout
WRAP_RANDOM := -Wl,--wrap=getrandom
WRAP_DEVICE := -Wl,--wrap=device_host_open
WRAPPED   := open close get next state apply sync
WRAP       = $(if $(filter %/support_wall.o,$1),$(WRAP_DEVICE)) \
             $(if $(filter %/support_faulty_index.o,$1),$(WRAPPED:%=-Wl,--wrap=index_%)) \
             $(if $(filter %/support_world.o,$1),$(WRAP_RANDOM)) \
             $(if $(filter %/support_faulty_calls.o,$1),$(WRAP_CALLS:%=-Wl,--wrap=%))

define test_rule
$B/$(1:.c=): WRAP_FLAGS := $(call WRAP,$(call objects_of,$1))
$B/$(1:.c=): $B/$(1:.c=.o) $(call objects_of,$1) $(call archives_of,$1)
	$$(call link,-lcmocka)
endef
$(foreach t,$(TEST_SRC) $(HELPER_SRC),$(eval $(call test_rule,$t)))

define gpu_rule
$B/$(1:.c=): WRAP_FLAGS := $(call WRAP,$(call objects_of,$1))
$B/$(1:.c=): $B/$(1:.c=.o) $(call objects_of,$1) $(call archives_of,$1)
	$$(call link,$(if $(call objects_of,$1),-lcmocka))
endef
$(foreach t,$(GPU_SRC),$(eval $(call gpu_rule,$t)))

define fuzz_rule
$B/$(1:.c=): WRAP_FLAGS := $(call WRAP,$(call objects_of,$1))
$B/$(1:.c=): $B/$(1:.c=.o) $(call objects_of,$1) $(call archives_of,$1)
	$$(call link,-fsanitize=fuzzer -lcmocka)
endef
$(foreach t,$(FUZZ_SRC),$(eval $(call fuzz_rule,$t)))

$(PROGRAMS): $B/%: $B/tools/%.o \
             $(patsubst %,$B/%.a,$(filter $(ARCHIVES),$(LAYERS)))
	$(call link)

-include $(shell find $B -name '*.d' 2>/dev/null)

# --- targets; those that may lack packages set up first, then call this file again

MAKE_ALL := $(MAKE) --no-print-directory -j$(shell nproc)

setup:
	@tools/setup.sh

test: setup
	@$(MAKE_ALL) test-programs
	@tools/run_tests.sh $(TESTS:%=$B/tests/%)

test-programs: $(PROGRAMS) $(ALL_TESTS) $(if $(filter release,$(CONFIG)),$(LIBRARY))

# Without a GPU they compile and link, no more.
gpu-programs: $(GPU_SRC:%.c=$B/%)

demo: setup
	@$(MAKE_ALL) all $(patsubst %.c,$B/%,$(filter tests/demo.c tests/sabotage%,$(HELPER_SRC)))
	@$B/tests/demo

crowd: setup
	@$(MAKE_ALL) all $B/tests/crowd
	@$B/tests/crowd $(if $(OUT),--out '$(OUT)' \
	    --commit "$$(git describe --always --dirty 2>/dev/null || echo unknown)")

# Without an NVIDIA GPU it says so; `nine --quick` is the same story on a processor.
# Its models are made from a seed: no file is fetched.
gpu-demo:
	@tools/setup.sh --packages
	@$(MAKE_ALL) all $B/tests/nine
	@mkdir -p '$(GPU_DEMO_OUT)' && rm -f '$(GPU_DEMO_OUT)'/nine_*.json \
	    '$(GPU_DEMO_OUT)'/nine_*.png '$(GPU_DEMO_OUT)'/failed
	@{ $B/tests/nine --model synth:8b --device cuda --device-memory 78.6GiB \
	    --threads $(shell nproc) --tokens $(or $(DEMO_TOKENS),131072) \
	    --users $(or $(DEMO_USERS),9) --sessions $(or $(DEMO_SESSIONS),10) \
	    --seconds $(or $(DEMO_SECONDS),300) --fit-tokens 2048 \
	    $(if $(DEMO_RECIPES),--recipes '$(DEMO_RECIPES)') \
	    $(if $(DEMO_STORE),--store '$(DEMO_STORE)') --out '$(GPU_DEMO_OUT)' \
	    --commit "$(or $(COMMIT),$$(git describe --always --dirty 2>/dev/null || echo unknown))" || \
	    touch '$(GPU_DEMO_OUT)/failed'; } | tee '$(GPU_DEMO_OUT)/nine_table.txt'; \
	    ! rm '$(GPU_DEMO_OUT)/failed' 2>/dev/null
	@python3 tools/plot_users.py $$(ls '$(GPU_DEMO_OUT)'/nine_*.json | grep -v overview) || \
	    echo 'gpu-demo: no pictures; the JSON files are whole'

test-kill: setup
	@$(MAKE_ALL) test-programs
	@for program in $(patsubst %.c,$B/%,$(filter tests/kill%,$(HELPER_SRC))); do \
	    $$program $(KILLS) || exit 1; done

# Clients stay in build/; what cannot be had here is skipped in so many words, never passed.
CLIENTS := openai huggingface_hub
DEFAULT_MODEL := $${COLDPLANE_HOME:-$$HOME/.coldplane}/models/$(shell \
                     sed -n 's/^model_name=//p' tools/setup.sh)
test-clients: setup
	@$(MAKE_ALL) all $B/tests/stage_http
	@[ -d build/clients ] || { python3 -m pip install --quiet --disable-pip-version-check \
	    --target build/clients.$$$$ $(CLIENTS) && mv build/clients.$$$$ build/clients; } || \
	    rm -rf build/clients.$$$$
	@if [ -d build/clients ]; then export PYTHONPATH=build/clients; \
	    python3 tests/openai_client.py --start $B/tests/stage_http && \
	    python3 tests/openai_client.py --daemon $B/coldplaned "$${MODEL:-$(DEFAULT_MODEL)}"; else \
	    echo 'test-clients: skipped: pip cannot fetch $(CLIENTS)'; echo '0 passed, 0 failed'; fi

test-page: setup
	@$(MAKE_ALL) $B/tests/stage_http
	@if command -v chromium >/dev/null; then \
	    python3 tests/page_check.py chromium $B/tests/stage_http $(SHOT); else \
	    echo 'test-page: skipped: chromium is not installed'; echo '0 passed, 0 failed'; fi

# The cases of tests/sweep.c, as many at a time as there are cores.
SWEEPS := power_cuts failing_io failing_space failing_quota failing_index \
          failing_index_after_its_effect failing_allocation full_disk
sweep: setup
	@$(MAKE_ALL) $B/tests/sweep $B/tests/flips $B/tests/branches
	@for case in $(SWEEPS); do printf '%s\n' $$case "$$case posix"; done | \
	    xargs -P $(shell nproc) -I CASE $B/tests/sweep $(STRIDE) CASE
	@$B/tests/flips 1000
	@$B/tests/branches 3000

sim: setup
	@$(MAKE_ALL) $B/tests/sim
	@$B/tests/sim $(SECONDS) $(SEED)

# Neither needs packages: the script builds the kernels alone, and skips the engine without them.
gpu-test:
	@tools/gpu.sh build/gpu test
	@cp build/gpu/gpu_test.json tests/results/gpu_test.json

gpu-bench:
	@tools/gpu.sh build/gpu bench
	@cp build/gpu/gpu_bench.json tests/results/gpu_bench.json

# New inputs stay in build/; those that found something belong into tests/corpus.
fuzz: setup
	@command -v clang >/dev/null || { echo 'make fuzz needs clang: apt-get install clang'; exit 1; }
	@$(MAKE_ALL) CONFIG=fuzz CUDA=0 fuzz-programs
	@printf '%s\n' $(FUZZ_SRC:tests/fuzz_%.c=%) | xargs -P 2 -I TARGET sh -c ' \
	    mkdir -p build/fuzz/found/TARGET && \
	    ASAN_OPTIONS=allocator_may_return_null=1 build/fuzz/tests/fuzz_TARGET \
	        -max_total_time=$(SECONDS) -timeout=20 -rss_limit_mb=3000 -print_final_stats=1 \
	        -artifact_prefix=build/fuzz/TARGET- build/fuzz/found/TARGET \
	        tests/corpus/TARGET >build/fuzz/TARGET.log 2>&1 || \
	        { tail -n 60 build/fuzz/TARGET.log; exit 1; }; \
	    echo "TARGET: $$(grep -a number_of_executed_units build/fuzz/TARGET.log)"'

fuzz-programs: $(FUZZ_SRC:%.c=$B/%)

sanitize:
	@$(MAKE) --no-print-directory CONFIG=asan test

# The tests in which threads meet, under the thread sanitizer.
THREADED := test_io test_io_calls test_read_help test_workers test_store_read test_snapshot \
            test_http test_http_load test_baton test_serve test_beside test_ram test_ahead \
            test_ask test_layers
threads: setup
	@$(MAKE_ALL) CONFIG=tsan CUDA=0 $(THREADED:%=build/tsan/tests/%)
	@QUICK=1 tools/run_tests.sh $(THREADED:%=build/tsan/tests/%)

bench: setup
	@$(MAKE_ALL) all $(patsubst %.c,$B/%,$(filter tests/bench%,$(HELPER_SRC)))
	@for what in store 'restore --build' model kv-quality; do \
	    $B/coldplane bench $$what || exit 1; done
	@for program in $(patsubst %.c,$B/%,$(filter tests/bench%,$(HELPER_SRC))); do \
	    $$program || exit 1; done

check: $(PRODUCT_OBJ)
	@tools/check.sh $^

check-twins: $(TEST_PROGRAMS) $(LONG_TESTS:%=$B/tests/%)
	@tools/check_twins.sh $B '$(CC) $(CPPFLAGS) $(CFLAGS)' '-Wl,--as-needed -lcmocka $(LDLIBS)' \
	    '$(TWINS)'

# For check-twins: what the program tests/$(TEST).c is linked from.
print-link:
	@echo $B/tests/$(TEST).o $(call objects_of,tests/$(TEST).c) \
	    $(call archives_of,tests/$(TEST).c) $(call WRAP,$(call objects_of,tests/$(TEST).c))

# The library: every object but those of tools/, in one archive that has no order.
LIBRARY_OBJ := $(foreach a,$(filter-out tools,$(LAYERS)),$(call OBJ_of,$a))
$B/libcoldplane.a: $(LIBRARY_OBJ) $(patsubst %,$B/gen/%.list,$(filter $(ARCHIVES),$(LAYERS)))
	$(if $(V),,@echo 'AR   $@')
	$(Q)rm -f $@.$$$$; ar rcs $@.$$$$ $(LIBRARY_OBJ) && mv -f $@.$$$$ $@

# What it is linked with, for its pkg-config file.
$B/gen/libs: FORCE
	@mkdir -p $(@D); echo '$(filter-out $(TOOLS_LIBS),$(LDLIBS))' >$@.$$$$; mv -f $@.$$$$ $@

INSTALL := DESTDIR='$(DESTDIR)' PREFIX='$(PREFIX)' tools/install.sh
install: all $(LIBRARY)
	@$(INSTALL) install $B

uninstall:
	@$(INSTALL) uninstall $B

deb: all $(LIBRARY)
	@$(INSTALL) deb $B

clean:
	rm -rf build
