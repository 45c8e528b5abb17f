"""Ray Data's tasks, which are not sent again without end."""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ray.data

#: How often Ray sends a task again whose process or node died; by itself it would for ever.
TASK_RETRIES = 10


def map_batches(
    rows: "ray.data.Dataset", function: Callable[..., Any], *, batch_format: str = "pyarrow", **options: Any
) -> "ray.data.Dataset":
    """As ``rows.map_batches(function, ...)``, in tasks that are sent again `TASK_RETRIES` times, and given views of Arrow's tables."""
    from ray.util.annotations import RayDeprecationWarning

    options |= {"batch_format": batch_format, "zero_copy_batch": True, "max_retries": TASK_RETRIES}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RayDeprecationWarning)  # Ray Data 2.60 has no other way yet to say it
        return rows.map_batches(function, **options)
