"""Runs the containers of the Kubernetes manifests as processes, with the environment that Kubernetes or the TFJob operator gives.

    unshare --mount --net python check_manifests.py DIR-OF-TFTRAIN MANIFESTS...

The private mounts hold /mnt and /etc/hosts, where every pod's name has a loopback address of its own; commands, arguments, names and
ports are the manifests' own.
"""
import itertools, json, os, re, subprocess, sys
from pathlib import Path

import yaml

NAMESPACE = "default"
TOKEN = "a-word-that-all-tasks-share"


def sh(*command):
    subprocess.run(command, check=True)


def mount(pod, objects):
    """What the pod finds at its mount paths. Volumes that the file does not define are errors, but for the secret."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for at in pod["containers"][0]["volumeMounts"]:
        volume, path = volumes[at["name"]], Path(at["mountPath"])
        assert path.parts[:2] == ("/", "mnt"), f"{path}: the check has only /mnt"
        path.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            for name, text in objects["ConfigMap", volume["configMap"]["name"]]["data"].items():
                (path / name).write_text(text)
        elif "secret" in volume:
            (path / "token").write_text(TOKEN)
        else:
            claim = objects["PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]]
            assert claim["spec"]["accessModes"] == ["ReadWriteMany"], claim


def expanded(text, env):
    """$(NAME) as the kubelet replaces it: unknown names stay."""
    return re.sub(r"\$\((\w+)\)", lambda m: env.get(m[1], m[0]), text)


def start(name, pod, given, path):
    container = pod["containers"][0]
    env = {"PATH": f"{path}:/usr/bin:/bin"} | given
    for variable in container.get("env", []):
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        assert field in (None, "metadata.namespace"), field
        env[variable["name"]] = NAMESPACE if field else expanded(variable["value"], env)
    command = [expanded(word, env) for word in container["command"] + container["args"]]
    assert not any("$(" in word for word in command), command
    return name, subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def indexed_job(job, objects):
    """Name, pod and environment of each of its pods, and the names in DNS."""
    spec, name = job["spec"], job["metadata"]["name"]
    template = spec["template"]
    pod, service = template["spec"], objects["Service", template["spec"]["subdomain"]]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"], spec
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"], service
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items(), service
    names = [f"{name}-{i}.{pod['subdomain']}.{NAMESPACE}.svc.cluster.local" for i in range(spec["completions"])]
    return names, [(f"{name}-{i}", pod, {"JOB_COMPLETION_INDEX": str(i)}) for i in range(len(names))]


def tf_job(job, objects):
    """The same; each replica has a service of its own, and the evaluator is not in the cluster."""
    name, cluster, pods = job["metadata"]["name"], {}, []
    for kind, replica in job["spec"]["tfReplicaSpecs"].items():
        role, pod = kind.lower(), replica["template"]["spec"]
        ports = {p["name"]: p["containerPort"] for p in pod["containers"][0]["ports"]}
        assert pod["containers"][0]["name"] == "tensorflow", pod
        hosts = [f"{name}-{role}-{i}.{NAMESPACE}.svc" for i in range(replica["replicas"])]
        if role != "evaluator":
            cluster[role] = [f"{host}:{ports['tfjob-port']}" for host in hosts]
        pods += [(f"{name}-{role}-{i}", pod, {"type": role, "index": i}) for i in range(len(hosts))]
    config = lambda task: {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})}
    names = [address.split(":")[0] for address in itertools.chain(*cluster.values())]
    return names, [(name, pod, config(task)) for name, pod, task in pods]


def check(file, path):
    documents = list(yaml.safe_load_all(Path(file).read_text()))
    objects = {(d["kind"], d["metadata"]["name"]): d for d in documents}
    assert len(objects) == len(documents), f"{file} names an object twice"
    ((kind, _), job), = ((key, d) for key, d in objects.items() if key[0] in ("Job", "TFJob"))
    names, pods = {"Job": indexed_job, "TFJob": tf_job}[kind](job, objects)
    sh("mount", "-t", "tmpfs", "tmpfs", "/mnt")
    Path("/mnt/hosts").write_text("".join(f"127.0.1.{i} {name}\n" for i, name in enumerate(names, 1)))
    sh("mount", "--bind", "/mnt/hosts", "/etc/hosts")
    for _, pod, _ in pods:
        mount(pod, objects)
    running = [start(*pod, path) for pod in pods]
    try:
        outputs = {name: process.communicate(timeout=60)[0] for name, process in running}
    finally:
        for _, process in running:
            process.kill()
    codes = {name: process.returncode for name, process in running}
    assert not any(codes.values()), "\n".join([f"{file}: {codes}", *outputs.values()])
    config = yaml.safe_load(Path("/mnt/config/train.yaml").read_text())
    lines = Path(config["train"]["dir"], "metrics.jsonl").read_text().splitlines()
    last = [line for line in map(json.loads, lines) if line["kind"] == "step"][-1]
    assert last["step"] == config["train"]["max_steps"] - 1, last
    if config["model"] == "line":
        values = dict(last["variables"])
        assert abs(values["weight"] - 5) < 0.05 and abs(values["bias"] - 8) < 0.05, last
    for name, output in outputs.items():
        assert "evaluator" not in name or "precision @ 1" in output, output
    sh("umount", "/etc/hosts", "/mnt")
    print(f"{file}: {', '.join(codes)} ended well, last step {last['step']}")


sh("ip", "link", "set", "lo", "up")
for manifest in sys.argv[2:]:
    check(manifest, sys.argv[1])
