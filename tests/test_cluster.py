"""What is in cluster/ is what Ray, Kubernetes, bash and Grafana accept, as far as that can be told without them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml

from hsray.events import COUNTERS
from pipelines.build import make_parser

ROOT = Path(__file__).parent.parent
CLUSTER = ROOT / "cluster"
VERSION = re.search(r"ray\[data,default\]>=(\d+\.\d+)", (ROOT / "setup.cfg").read_text())[1]


def load(name: str) -> dict:
    return yaml.safe_load((CLUSTER / name).read_text())


@pytest.mark.parametrize("name", ["ray-up-aws.yaml", "ray-up-gcp.yaml"])
def test_a_file_for_ray_up_passes_rays_own_schema(name):
    config = load(name)
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    assert config["head_node_type"] in config["available_node_types"]
    for commands in (config["head_start_ray_commands"], config["worker_start_ray_commands"]):
        assert "RAY_AUTH_MODE=token" in " ".join(commands)
    assert "--autoscaling-config" in " ".join(config["head_start_ray_commands"])
    gpu = config["available_node_types"]["gpu"]
    assert 1 <= gpu["min_workers"] <= gpu["max_workers"] <= config["max_workers"]
    assert "spot" in json.dumps(gpu).lower()
    assert "spot" not in json.dumps(config["available_node_types"]["head"]).lower()


def clusters() -> list:
    return [load("raycluster.yaml")["spec"], load("rayjob.yaml")["spec"]["rayClusterSpec"]]


@pytest.mark.parametrize("spec", clusters(), ids=["raycluster", "rayjob"])
def test_a_cluster_of_kuberay_is_a_head_without_a_gpu_and_spot_workers_with_one(spec):
    assert spec["rayVersion"].startswith(VERSION)
    assert spec["authOptions"] == {"mode": "token"}
    (worker,) = spec["workerGroupSpecs"]
    assert 1 <= worker["minReplicas"] <= worker["replicas"] <= worker["maxReplicas"]
    for group, num_gpus in ((spec["headGroupSpec"], None), (worker, "1")):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["resources"]["limits"].get("nvidia.com/gpu") == num_gpus
        mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounts == {volume["name"] for volume in pod.get("volumes", ())}
    assert "spot" in json.dumps(worker["template"]["spec"]["nodeSelector"])


def test_both_manifests_of_kuberay_describe_one_cluster():
    first, second = clusters()
    assert first == second


def test_the_job_runs_a_command_that_the_script_understands():
    job = load("rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    python, script, *flags = job["spec"]["entrypoint"].split()
    assert python == "python" and (ROOT / Path(script).relative_to("/opt/hsray")).exists()
    assert make_parser().parse_args(flags).engines == 8
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]


def test_the_image_has_the_ray_that_is_wanted():
    assert f"FROM rayproject/ray:{VERSION}." in (CLUSTER / "Dockerfile").read_text()


@pytest.mark.parametrize("checker", [["bash", "-n"], ["shellcheck"]])
def test_the_slurm_script_is_sound(checker):
    # The test extra puts shellcheck beside the interpreter.
    program = shutil.which(checker[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    ended = subprocess.run([program, *checker[1:], CLUSTER / "slurm.sh"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_dashboard_shows_every_counter_and_no_other():
    dashboard = json.loads((CLUSTER / "grafana.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    names = set(re.findall(r"ray_hsray_(\w+)\{", asked))
    made = {f"{name}_total" for name in (*COUNTERS, "seconds")} | {"shards_left"}
    assert names <= made
    assert made - names <= {"shards_total"}  # what is left of them is shown
    assert all("$dataset" in target["expr"] for panel in dashboard["panels"] for target in panel["targets"])


def test_every_line_to_change_is_marked_and_the_readme_names_every_file():
    readme = (CLUSTER / "README.md").read_text()
    for path in CLUSTER.iterdir():
        assert path.name == "README.md" or path.name in readme
        for line in path.read_text().splitlines() if path.suffix == ".yaml" else ():
            assert not re.search(r"REGISTRY|PROJECT\b|image:", line) or "CHANGE" in line or "PROJECT.iam" in line
