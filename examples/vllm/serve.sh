#!/bin/sh
# Two vLLM servers on one host that reuse each other's KV, through one cache server:
#
#   examples/vllm/serve.sh MODEL
#
# The first takes GPU 0 and port 8000, the second GPU 1 and port 8001. Kill one of them at any time; what it computed stays.
set -eu
model=$1
socket=${KVFERRY_SOCKET:-/tmp/kvferry.sock}
config='{
  "kv_connector": "KVFerryConnector",
  "kv_connector_module_path": "kvferry.connectors.vllm",
  "kv_role": "kv_both",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"url": "unix://'$socket'"}
}'
trap 'kill 0' EXIT
kvferry serve --socket "$socket" --memory "${KVFERRY_MEMORY:-32GiB}" &
for gpu in 0 1; do
    CUDA_VISIBLE_DEVICES=$gpu vllm serve "$model" --port "800$gpu" --kv-transfer-config "$config" &
done
wait
