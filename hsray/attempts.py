"""How often a shard, or a prompt, was begun by an engine's process that then died; kept in the cluster, which survives it.

Ray counts a task's attempts too, but not what this asks: a task whose actor is gone with its node it sends again and again
until the actor has started elsewhere, so that one death may count as seven, for tasks that no engine had begun as well.
"""

import json
from dataclasses import asdict, dataclass

#: Where it is kept, in Ray's own key-value store: what is written to a log is on a node that may be gone.
NAMESPACE = b"hsray"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Of one shard, or one prompt."""

    begun: int = 0
    """How often it was, and neither made nor given up for a reason of its own."""
    words: str = ""
    """What the engine said the last time, if it could."""


def past_attempts(key: str) -> Attempts:
    """Those so far."""
    from ray.experimental.internal_kv import _internal_kv_get

    kept = _internal_kv_get(key.encode(), namespace=NAMESPACE)
    return Attempts(**json.loads(kept)) if kept else Attempts()


def begin_attempt(key: str) -> None:
    """Counts one more, of which nothing is known yet."""
    _keep(key, Attempts(begun=past_attempts(key).begun + 1))


def leave_words(key: str, words: str) -> None:
    """Says of the attempt that was begun how it went, for whoever comes next."""
    _keep(key, Attempts(begun=past_attempts(key).begun, words=words))


def forget_attempts(key: str) -> None:
    """It has been made, or given up."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(key.encode(), namespace=NAMESPACE)


def actor_id() -> str:
    """Of the actor that runs here; it stays the same when Ray starts it anew."""
    import ray

    return ray.get_runtime_context().get_actor_id()


def _keep(key: str, attempts: Attempts) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key.encode(), json.dumps(asdict(attempts)).encode(), namespace=NAMESPACE)
