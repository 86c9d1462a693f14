#!/bin/sh
# Makes sure of what building and testing need from the system: sh tests/system_packages.sh NEED...
#
#   compiler   a C++20 compiler           python    Python's headers and venv, for the Python in $PYTHON (python3)
#   gtest      GoogleTest                 browser   Chromium, in which the tests look at reports; without one they skip
#   benchmark  google-benchmark           git, make themselves
#   clang      clang with libFuzzer and the sanitizers
#
# Installs what is missing where it may (root or password-less sudo, on Debian and Ubuntu); says what to install where it
# may not, and fails.
set -u
has_command() { command -v "$1" >/dev/null 2>&1; }
has_header() { printf '#include <%s>\n' "$1" | ${CXX:-c++} -x c++ -E - >/dev/null 2>&1; }
has_libfuzzer() {
    has_command clang++ && probe=$(mktemp) &&
        echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
        clang++ -fsanitize=fuzzer,address -x c++ - -o "$probe" 2>/dev/null
    status=$?
    rm -f "${probe:-}"
    return $status
}
has_python() {
    has_command "${PYTHON:-python3}" && "${PYTHON:-python3}" -c '
import ensurepip, os, sysconfig
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null
}
has_browser() { for name in chromium chromium-browser google-chrome chrome; do has_command $name && return; done; return 1; }

missing=""
for need in "$@"; do
    case $need in
    compiler) has_command "${CXX:-c++}" || missing="$missing g++" ;;
    python) has_python || missing="$missing python3 python3-venv python3-dev" ;;
    gtest) has_header gtest/gtest.h || missing="$missing libgtest-dev" ;;
    clang) has_libfuzzer || missing="$missing clang" ;;
    benchmark) has_header benchmark/benchmark.h || missing="$missing libbenchmark-dev" ;;
    browser) has_browser || missing="$missing chromium" ;;
    git | make) has_command "$need" || missing="$missing $need" ;;
    *) echo "system_packages.sh: unknown need '$need'; the head of this file lists them" >&2 && exit 2 ;;
    esac
done
[ -z "$missing" ] && exit 0

if [ "$(id -u)" = 0 ]; then as_root=""; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else as_root="no"; fi
if [ "$as_root" != no ] && has_command apt-get; then
    echo "installing$missing"
    # shellcheck disable=SC2086  # the lists are meant to split
    { $as_root apt-get update -qq && DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq $missing; } >/dev/null && exit 0
fi
echo "Needed from the system:$missing (Debian's names of the packages)." >&2
echo "Install with: sudo apt-get install$missing" >&2
exit 1
