#!/bin/sh
# tools/install.sh - puts what was built in its places, takes it away again, makes a Debian package.
#
# Responsible for: programs, man pages, completion, unit file, library with headers and pkg-config
# file; a list of what was installed, so that exactly that is removed, also by a later version.
# Not responsible for: building (Makefile), stores and keys: they stay when the program goes.
set -eu

usage() {
    cat <<END
usage: tools/install.sh install|uninstall|deb BUILD
  install    from the build folder BUILD to \$DESTDIR\$PREFIX (usually \`make install\`)
  uninstall  what the list of the last install names
  deb        BUILD/coldplane_VERSION_ARCH.deb with PREFIX=/usr; needs dpkg-deb
Variables: DESTDIR (empty), PREFIX (/usr/local), CC.
END
}

fail() {
    echo "install: $*" >&2
    exit 1
}

# What a program that uses the library includes; the headers that these include go along.
public_headers='engine/engine.h engine/model/template.h engine/model/tokenizer.h
restore/restore.h snapshot/snapshot.h store/store.h'

headers() {
    # shellcheck disable=SC2086 # one word per header
    printf '#include "%s"\n' $public_headers |
        ${CC:-cc} -std=c11 -D_GNU_SOURCE -I. -MM -MT headers -x c - |
        tr -d '\\' | tr ' ' '\n' | grep '\.h$' | sort -u
}

# Text as roff takes it as it stands.
roff() {
    sed -e 's/\\/\\e/g' -e 's/-/\\-/g' -e "s/^\([.']\)/\\\\\&\1/"
}

daemon_page() {
    echo '.TH COLDPLANED 8'
    echo '.SH NAME'
    echo 'coldplaned \- chat sessions over HTTP that outlive idle nights and restarts'
    echo '.SH DESCRIPTION'
    echo '.nf'
    "$build/coldplaned" --help | roff
    echo '.fi'
    echo '.SH SEE ALSO'
    echo '.BR coldplane (1)'
}

pkg_config() {
    cat <<END
prefix=$prefix
includedir=\${prefix}/include/coldplane
libdir=\${prefix}/lib

Name: coldplane
Description: chat sessions on one accelerator that sleep on disk and wake proven
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -lcoldplane $(cat "$build/gen/libs")
END
}

# Everything that is made for this prefix, into $made.
make_files() {
    mkdir -p "$made"
    "$build/coldplane" help man >"$made/coldplane.1"
    "$build/coldplane" help bash >"$made/coldplane.bash"
    pkg_config >"$made/coldplane.pc"
    [ ! -x "$build/coldplaned" ] || daemon_page >"$made/coldplaned.8"
    sed "s,@BINDIR@,$prefix/bin," tools/coldplaned.service >"$made/coldplaned.service"
}

# Lines `mode source target`, the target below the prefix.
manifest() {
    echo "755 $build/coldplane bin/coldplane"
    echo "644 $made/coldplane.1 share/man/man1/coldplane.1"
    echo "644 $made/coldplane.bash share/bash-completion/completions/coldplane"
    if [ -x "$build/coldplaned" ]; then
        echo "755 $build/coldplaned bin/coldplaned"
        echo "644 $made/coldplaned.8 share/man/man8/coldplaned.8"
        echo "644 $made/coldplaned.service lib/systemd/system/coldplaned.service"
    fi
    echo "644 $build/libcoldplane.a lib/libcoldplane.a"
    echo "644 $made/coldplane.pc lib/pkgconfig/coldplane.pc"
    headers | sed 's,.*,644 & include/coldplane/&,'
    echo '644 README.md share/doc/coldplane/README.md'
}

# $1: the root that stands for /
put_files() {
    make_files
    manifest >"$made/manifest"
    while read -r mode source target; do
        install -D -m "$mode" "$source" "$1$prefix/$target"
    done <"$made/manifest"
}

install_files() {
    put_files "$DESTDIR"
    { cut -d' ' -f3 "$made/manifest"; echo "$list"; } >"$made/files"
    install -D -m 644 "$made/files" "$DESTDIR$prefix/$list"
}

uninstall_files() {
    [ -f "$DESTDIR$prefix/$list" ] ||
        fail "nothing was installed with this DESTDIR and PREFIX: no $DESTDIR$prefix/$list"
    mkdir -p "$build"
    cp "$DESTDIR$prefix/$list" "$made.files"
    while read -r target; do
        case $target in
        /* | *..*) fail "$DESTDIR$prefix/$list names $target: that is no list of ours" ;;
        esac
        rm -f "$DESTDIR$prefix/$target"
    done <"$made.files"
    # Folders that only we use, the innermost first.
    sed -n -e 's,^\(include/coldplane\(/.*\)*\)/[^/]*$,\1,p' "$made.files" |
        awk '{ n = split($0, part, "/"); path = ""
               for (i = 1; i <= n; i++) { path = path (i > 1 ? "/" : "") part[i]
                   if (i > 1) print path } }' |
        sort -ru >"$made.folders"
    printf '%s\n' share/doc/coldplane share/coldplane >>"$made.folders"
    while read -r folder; do
        [ ! -d "$DESTDIR$prefix/$folder" ] ||
            rmdir --ignore-fail-on-non-empty "$DESTDIR$prefix/$folder"
    done <"$made.folders"
    rm -f "$made.files" "$made.folders"
}

# The packages of the libraries that the programs load.
depends() {
    for program in "$1"/usr/bin/*; do
        ldd "$program" | sed -n 's/.*=> \(\/[^ ]*\) .*/\1/p'
    done | sort -u | while read -r library; do
        path=$(readlink -f "$library")
        dpkg -S "$path" 2>/dev/null || dpkg -S "${path#/usr}" 2>/dev/null || dpkg -S "$library" ||
            fail "no package has $library: the package could not say what it needs"
    done | sed 's/:.*//' | sort -u | while read -r package; do
        version_of=$(dpkg-query -W -f '${Version}' "$package" | sed 's/[+~-].*//')
        printf '%s (>= %s), ' "$package" "$version_of"
    done | sed 's/, $//'
}

control() {
    cat <<END
Package: coldplane
Version: $version
Architecture: $(dpkg --print-architecture)
Maintainer: coldplane <root@localhost>
Section: misc
Priority: optional
Installed-Size: $(du -sk --exclude=DEBIAN "$1" | cut -f1)
Depends: $2
Description: chat sessions on one accelerator that sleep on disk and wake proven
 A serving engine that keeps long chat sessions in tiers, puts them to sleep on
 disk and wakes them bit for bit; a command line and an OpenAI-compatible daemon.
END
}

# A running daemon is restarted by an upgrade: it saves every session when it ends, and the new
# program opens stores of every older format. Stores and keys in /var/lib/coldplane always stay.
scripts() {
    cat >"$1/postinst" <<'END'
#!/bin/sh
set -e
[ -d /run/systemd/system ] || exit 0
systemctl daemon-reload
[ "$1" != configure ] || [ -z "${2:-}" ] || systemctl try-restart coldplaned.service
END
    cat >"$1/prerm" <<'END'
#!/bin/sh
set -e
[ "$1" = remove ] && [ -d /run/systemd/system ] || exit 0
systemctl stop coldplaned.service || true
END
    cat >"$1/postrm" <<'END'
#!/bin/sh
set -e
[ ! -d /run/systemd/system ] || systemctl daemon-reload
END
    chmod 755 "$1/postinst" "$1/prerm" "$1/postrm"
}

make_deb() {
    command -v dpkg-deb >/dev/null || fail 'a Debian package needs dpkg-deb: run this on Debian'
    root=$made/deb
    rm -rf "$root"
    put_files "$root"
    mkdir -p "$root/DEBIAN"
    if [ -x "$build/coldplaned" ]; then
        install -D -m 644 tools/coldplaned.default "$root/etc/default/coldplaned"
        echo /etc/default/coldplaned >"$root/DEBIAN/conffiles"
        scripts "$root/DEBIAN"
    fi
    needs=$(depends "$root")
    [ -n "$needs" ] || fail 'ldd says of no library that the programs need it'
    control "$root" "$needs" >"$root/DEBIAN/control"
    package=$build/coldplane_${version}_$(dpkg --print-architecture).deb
    dpkg-deb --root-owner-group -Zgzip -b "$root" "$package" >/dev/null
    rm -rf "$root"
    echo "$package"
}

[ $# -eq 2 ] || { usage >&2; exit 1; }
build=$2 prefix=${PREFIX:-/usr/local} DESTDIR=${DESTDIR:-}
made=$build/install list=share/coldplane/files
case $1 in
install | deb)
    [ -s "$build/gen/libs" ] || fail "$build is not built: run make install or make deb"
    version=$("$build/coldplane" version | sed -n '1s/^coldplane \([^:]*\):.*/\1/p')
    [ -n "$version" ] || fail "$build/coldplane does not say its version"
    ;;
esac
case $1 in
install) install_files ;;
uninstall) uninstall_files ;;
deb)
    prefix=/usr
    make_deb
    ;;
*)
    usage >&2
    exit 1
    ;;
esac
