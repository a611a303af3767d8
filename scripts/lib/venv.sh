# Sourced by the other scripts: makes .venv and installs KVferry into it, once for each state of pyproject.toml.
# pip reads its own variables (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_CONSTRAINT, ...) as always.

find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    echo "KVferry needs Python 3.10 or newer; none was found. Set PYTHON to one." >&2
    return 1
}

# ensure_venv [EXTRAS]: EXTRAS is what follows the package name, e.g. "[test]".
ensure_venv() {
    extras=${1:-}
    stamp=".venv/installed$(echo "$extras" | tr -c 'a-z0-9\n' '-')"
    wanted=$(cksum <pyproject.toml)
    if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    python=$(find_python) || return 1
    if [ ! -x .venv/bin/python ]; then
        echo "making .venv with $("$python" --version)" >&2
        "$python" -m venv .venv || {
            echo "'$python -m venv' failed; on Debian and Ubuntu install the package python3-venv." >&2
            return 1
        }
    fi
    echo "installing kvferry$extras into .venv (torch is large: this can take minutes)" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".$extras" >&2
    echo "$wanted" >"$stamp"
}
