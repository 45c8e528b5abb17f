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

    @property
    def failure(self) -> str:
        """Why there is to be no further one."""
        return self.words or died(self.begun, "it was there")


def attempt_key(turn: str, *what: object) -> str:
    """Under which those of a shard, or of what else there is in a job's turn, are kept."""
    return "/".join(map(str, (turn, *what)))


def past_attempts(key: str) -> Attempts:
    """Those so far."""
    from ray.experimental.internal_kv import _internal_kv_get

    kept = _internal_kv_get(key.encode(), namespace=NAMESPACE)
    return Attempts(**json.loads(kept)) if kept else Attempts()


def given_up(turn: str, max_attempts: int) -> dict[int, str]:
    """The shards that were begun so often: number -> why there is to be no further attempt."""
    from ray.experimental.internal_kv import _internal_kv_list

    of_turn = attempt_key(turn, "")
    keys = [key.decode() for key in _internal_kv_list(of_turn, namespace=NAMESPACE)]
    shards = {int(what): past_attempts(key) for key in keys if (what := key.removeprefix(of_turn)).isdecimal()}
    return {shard: past.failure for shard, past in shards.items() if past.begun >= max_attempts}


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


def died(times: int, when: str) -> str:
    """What is said of an engine's process that left no words."""
    return (
        f"the engine's process died {times} time{'s' * (times > 1)} while {when}, without a word; out of memory is the usual cause "
        "(the kernel's log says so), or it stood still for request_timeout_s (the worker's log says so)"
    )


def actor_id() -> str:
    """Of the actor that runs here; it stays the same when Ray starts it anew."""
    import ray

    return ray.get_runtime_context().get_actor_id()


def _keep(key: str, attempts: Attempts) -> None:
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key.encode(), json.dumps(asdict(attempts)).encode(), namespace=NAMESPACE)
