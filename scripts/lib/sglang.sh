# Sourced by scripts/test-sglang*: an environment with the real SGLang engine on a CPU.
#
# sglang asks for packages for GPUs of many GB. A text model on a CPU needs those below; for triton, torchvision and
# sgl_kernel, which are imported and not used, tests/sglang_engine/stand_ins.py stands in.

. scripts/lib/venv.sh

sglang_release=0.5.23
sglang_venv=.venv-sglang-$sglang_release
sglang_packages="orjson psutil pybase64 requests packaging pillow starlette msgspec pyzmq tqdm IPython pydantic aiohttp
    transformers==5.19.0 dill apache-tvm-ffi==0.1.11 sentencepiece gguf loguru openai==2.8.0 partial_json_parser
    uvloop uvicorn fastapi setproctitle einops prometheus-client xxhash interegular llguidance>=1.7.6,<2 mistral_common
    python-multipart ninja"
sglang_alone="sglang==$sglang_release compressed-tensors==0.18.0 xgrammar==0.2.7"

ensure_sglang() {
    stamp=$sglang_venv/installed
    wanted="$(cksum <pyproject.toml) $(cksum <scripts/lib/sglang.sh) $(cksum <tests/sglang_engine/stand_ins.py)"
    if [ -x "$sglang_venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    python=$(find_python) || return 1
    echo "installing sglang $sglang_release into $sglang_venv (1.6 GB: this takes minutes)" >&2
    [ -x "$sglang_venv/bin/python" ] || "$python" -m venv "$sglang_venv"
    pip="$sglang_venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile"
    # shellcheck disable=SC2086 # several names
    $pip $sglang_packages -e . "pytest>=8.2" "pytest-timeout>=2.3" >&2 || return 1
    # Last, since pip would complain of all that they ask for.
    # shellcheck disable=SC2086
    $pip --no-deps $sglang_alone >&2 || return 1
    site=$("$sglang_venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp tests/sglang_engine/stand_ins.py "$site/kvferry_stand_ins.py"
    echo 'import kvferry_stand_ins' >"$site/kvferry_stand_ins.pth"
    echo "$wanted" >"$stamp"
}

# Without compiled files SGLang takes twice as long to import.
run_sglang_tests() {
    unset PYTHONDONTWRITEBYTECODE
    export SGLANG_USE_CPU_ENGINE=1
    "$sglang_venv/bin/python" -m pytest -c tests/sglang_engine/pytest.ini --rootdir tests/sglang_engine \
        tests/sglang_engine "$@"
}
