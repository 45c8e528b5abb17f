"""Shows what a choice of layers comes to for a model, and what number other systems give to the same states.

python pipelines/layers.py --model Qwen/Qwen3-8B --layers eagle3
"""

import argparse
import sys
from collections.abc import Sequence

from hsray.layers import explain
from hsray.model import describe_model


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table, or one error."""
    parser = argparse.ArgumentParser(
        description="What a choice of layers comes to for a model, and what number other systems give to the same states. "
        "Reads the model's config alone."
    )
    parser.add_argument("--model", required=True, help="a local folder or a hub name")
    parser.add_argument(
        "--layers", required=True, nargs="+", metavar="LAYER", help="as in build.py; 'all' shows every state"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's own code run")
    arguments = parser.parse_args(argv)
    layers = arguments.layers[0] if len(arguments.layers) == 1 else arguments.layers
    try:
        model = describe_model(arguments.model, trust_remote_code=arguments.trust_remote_code)
        print(explain(layers, num_layers=model.num_layers))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
