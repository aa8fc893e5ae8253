"""The stores this distribution registers. Light: a provider's library is imported when a state lies there."""

from collections.abc import Iterable

from spill.plugins import StoreSpec, hookimpl

_HERE = "spill_store_cloud"


@hookimpl
def spill_stores() -> Iterable[StoreSpec]:
    """`s3`, `gs` and `az`."""
    s3 = "Amazon S3 and stores that speak its protocol, through s3fs"
    yield StoreSpec(name="s3", target=f"{_HERE}.s3:open_s3", contract=1, summary=s3)
    yield StoreSpec(name="gs", target=f"{_HERE}.gs:open_gs", contract=1, summary="Google Cloud Storage, through gcsfs")
    yield StoreSpec(name="az", target=f"{_HERE}.az:open_az", contract=1, summary="Azure Blob Storage, through adlfs")
