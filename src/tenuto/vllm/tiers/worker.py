"""Where vLLM's OffloadingConnector finds our specs.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "HostSpec", "spec_module_path": "tenuto.vllm.tiers.worker",
        "cpu_bytes_to_use": …}}'

`tenuto serve --host-gb` writes this option. The disk is used only under Tenuto's scheduler, which tells it
what KV depends on.
"""

from tenuto.vllm.compat.specs import DiskSpec, HostSpec

__all__ = ["DiskSpec", "HostSpec"]
