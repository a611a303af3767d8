"""The connector's module costs nothing before vLLM asks for the class."""

from __future__ import annotations

import subprocess
import sys


def test_the_module_imports_neither_vllm_nor_a_server() -> None:
    script = (
        "import sys, kvferry.connectors.vllm as module; "
        "assert 'vllm' not in sys.modules and 'kvferry.server' not in sys.modules; "
        "assert 'KVFerryConnector' in module.__all__ and 'P2pNcclConnector' in module.__all__; "
        "assert not hasattr(module, 'Other')"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=50)
