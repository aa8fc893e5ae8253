"""What forked builds find imported already: the libraries of the clouds, and botocore's description of S3."""

import functools
import os
from importlib import import_module
from importlib.util import find_spec

# As open_gs sets it, before gcsfs is imported.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
for library, module in {"s3fs": "s3", "gcsfs": "gs", "adlfs": "az"}.items():
    if find_spec(library):
        import_module(library)
        import_module(f"spill_store_cloud.{module}")
if find_spec("adlfs"):
    import_module("azure.storage.blob.aio")
if find_spec("s3fs"):
    from botocore import loaders

    loaders.create_loader = functools.cache(loaders.create_loader)
    for kind in ("service-2", "endpoint-rule-set-1"):
        loaders.create_loader().load_service_model("s3", kind)
