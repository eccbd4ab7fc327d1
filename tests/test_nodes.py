"""Two nodes on one machine: each in a network namespace with a /dev/shm of its own. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time

import pytest

from tests.checkpoints import DENSE
from tests.servers import PYTHON, READY_SECONDS, users_environment

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and iproute2"),
]

ASK = """
import json, sys, requests
url, answers = "http://10.77.0.1:30500", []
for n in (40, 5):
    body = {"input_ids": list(range(1, n + 1)), "sampling_params": {"temperature": 0, "max_new_tokens": 6}}
    answer = requests.post(url + "/generate", json={**body, "return_logprob": True}, timeout=120).json()
    answers.append([answer["output_ids"], [x[0] for x in answer["meta_info"]["output_token_logprobs"]]])
state = requests.get(url + "/server_info", timeout=60).json()["internal_states"][0]["shift_parallel"]
print(json.dumps([answers, state]))
"""


def sh(command: str) -> None:
    subprocess.run(command, shell=True, check=True, capture_output=True)


@pytest.fixture
def namespaces():
    names = ("shift-node0", "shift-node1")
    for name in names:
        sh(f"ip netns add {name}")
    try:
        sh(f"ip link add v0 netns {names[0]} type veth peer name v1 netns {names[1]}")
        for index, name in enumerate(names):
            sh(f"ip -n {name} addr add 10.77.0.{index + 1}/24 dev v{index}")
            sh(f"ip -n {name} link set v{index} up; ip -n {name} link set lo up")
        yield names
    finally:
        for name in names:
            sh(f"ip netns del {name}")


@pytest.mark.parametrize(("world", "sp"), [(2, 2), (4, 2)])
def test_two_nodes_answer_as_one(world, sp, namespaces, checkpoint, start, tmp_path):
    stock = start(DENSE, world, plugin=False)
    expected = [stock.call(_ask, n) for n in (40, 5)]
    stock.close()
    processes = []
    try:
        for index, name in enumerate(namespaces):
            serve = (
                f"{PYTHON} -m sgl_shift.launch_server --model-path {checkpoint(DENSE)} --skip-tokenizer-init "
                f"--tp-size {world} --sp-size {sp} --shift-threshold 20 --sleep-on-idle --port 30500 "
                f"--nnodes 2 --node-rank {index} --dist-init-addr 10.77.0.1:5555 --host 10.77.0.{index + 1}"
            )
            inside = f"mount -t tmpfs tmpfs /dev/shm && exec {serve}"
            node = {"GLOO_SOCKET_IFNAME": f"v{index}", "SGLANG_HOST_IP": f"10.77.0.{index + 1}"}
            with (tmp_path / f"node{index}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", name, "unshare", "-m", "sh", "-c", inside],
                        env={**users_environment(), **node},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        log = tmp_path / "node0.log"
        deadline = time.monotonic() + READY_SECONDS
        while "The server is fired up" not in log.read_text():
            assert all(p.poll() is None for p in processes), log.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        ask = ["ip", "netns", "exec", namespaces[0], PYTHON, "-c", ASK]
        answers, state = json.loads(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)
        for (tokens, logprobs), (right, right_logprobs) in zip(answers, expected, strict=True):
            assert tokens == right
            assert all(abs(a - b) < 1e-3 for a, b in zip(logprobs, right_logprobs, strict=True))
        assert state["tokens"]["base"] == 40
        assert state["tokens"]["shift"] > 0
        assert ("cross nodes" in log.read_text()) == (world > sp)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ask(engine, n: int):
    params = {"temperature": 0, "max_new_tokens": 6}
    answer = engine.generate(input_ids=list(range(1, n + 1)), sampling_params=params, return_logprob=True)
    return answer["output_ids"], [x[0] for x in answer["meta_info"]["output_token_logprobs"]]
