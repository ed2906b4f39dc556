"""Check job files against KubeRay's schema, as `kubectl apply --validate=strict` would.

    python deploy/check_rayjob.py ray.io_rayjobs.yaml                         # deploy/rayjob-*.yaml
    python deploy/check_rayjob.py ray.io_rayjobs.yaml my-job.yaml

The schema is helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml of github.com/ray-project/kuberay. PyYAML and
jsonschema, which this needs, come with Ray. The exit code is 1 if a file does not fit:

    deploy/rayjob-fsdp2.yaml: spec.rayClusterSpec.workerGroupSpecs.0: Additional properties are not allowed
    ('replica' was unexpected)
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import yaml

FOLDER = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schema", type=Path)
    parser.add_argument("jobs", type=Path, nargs="*", default=sorted(FOLDER.glob("rayjob-*.yaml")))
    arguments = parser.parse_args()
    definition = yaml.safe_load(arguments.schema.read_text())
    failed = False
    for path in arguments.jobs:
        mistakes = list(mistakes_in(yaml.safe_load(path.read_text()), definition))
        for mistake in mistakes:
            print(f"{path}: {mistake}")
        failed |= bool(mistakes)
        if not mistakes:
            print(f"{path}: fits")
    return int(failed)


def mistakes_in(job: Mapping[str, Any], definition: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of a job does not fit its version of a CustomResourceDefinition.

    Raises KeyError if the definition has no such version.
    """
    names = definition["spec"]
    schemas = {f"{names['group']}/{v['name']}": v["schema"]["openAPIV3Schema"] for v in names["versions"]}
    if job["kind"] != names["names"]["kind"]:
        yield f"kind is {job['kind']}, and the schema is of {names['names']['kind']}"
        return
    for error in jsonschema.Draft202012Validator(closed(schemas[job["apiVersion"]])).iter_errors(job):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


def closed(schema: Any) -> Any:
    """Return the schema with no field allowed that it does not name: an apiserver drops such a field in silence."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(item) for name, item in schema.items()}
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        inner.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    return inner


if __name__ == "__main__":
    sys.exit(main())
