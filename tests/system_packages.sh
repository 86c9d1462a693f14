#!/bin/sh
# Makes sure of what the tests need from the system: a C++20 compiler, GoogleTest, google-benchmark and
# Chromium. Installs what is missing where it may (root or password-less sudo, on Debian and Ubuntu); says what to install where it may not.
set -u
has_header() { printf '#include <%s>\n' "$1" | ${CXX:-g++} -x c++ -E - >/dev/null 2>&1; }

missing=""
command -v "${CXX:-g++}" >/dev/null 2>&1 || missing="$missing g++"
has_header gtest/gtest.h || missing="$missing libgtest-dev"
has_header benchmark/benchmark.h || missing="$missing libbenchmark-dev"
# The report is looked at in a browser, by any of these names.
for browser in chromium chromium-browser google-chrome chrome none; do command -v $browser >/dev/null 2>&1 && break; done
[ "$browser" = none ] && missing="$missing chromium"
[ -z "$missing" ] && exit 0

if [ "$(id -u)" = 0 ]; then as_root=""; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else as_root="no"; fi
if [ "$as_root" != no ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing$missing"
    # shellcheck disable=SC2086  # the lists are meant to split
    { $as_root apt-get update -qq && DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq $missing; } >/dev/null && exit 0
fi
echo "The tests need from the system:$missing (Debian's names; elsewhere GoogleTest, google-benchmark and Chromium)." >&2
echo "Install with: sudo apt-get install$missing" >&2
exit 1
