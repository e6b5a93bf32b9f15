"""Findings on the network from what all nodes tried of each other's addresses."""

from __future__ import annotations

from mlflow_batchai.admin.doctor import State
from mlflow_batchai.admin.doctor.findings import network as judge

OK, FAILED = State.OK, State.FAILED


def node(*addresses, machine="x", **more):
    interfaces = [{"name": f"eth{n}", "address": a} for n, a in enumerate(addresses)]
    return {"interfaces": interfaces, "port": 1, "ports": "1-2", "machine": machine, "trouble": "", **more}


def test_of_one_node_or_one_machine():
    assert judge({}, {}) == {}
    assert judge({"a": node("1.1.1.1")}, {"a": {}}) == {"a": (OK, "no other node to reach, eth0 (1.1.1.1)")}
    both = judge({"a": node("1.1.1.1"), "b": node("1.1.1.1")}, {"a": {"b": [""]}, "b": {"a": [""]}})
    assert both == dict.fromkeys("ab", (OK, "all nodes are on one machine: loopback"))


def test_of_one_machine_without_the_interface_that_is_named():
    """Each of the job's agents would refuse it."""
    lacking = node(trouble="has no network interface eth7")
    text = "it has no network interface eth7: correct networkInterface in the cluster document"
    assert judge({"a": lacking}, {"a": {}}) == {"a": (FAILED, text)}
    both = judge({"a": lacking, "b": lacking}, {"a": {"b": []}, "b": {"a": []}})
    assert both == dict.fromkeys("ab", (FAILED, text))


def test_names_the_interface_or_who_does_not_reach_it():
    nodes = {name: node(f"10.0.0.{n}", f"10.1.0.{n}", machine=name) for n, name in enumerate("abc")}
    reached = {one: {other: ["", ""] for other in nodes if other != one} for one in nodes}
    assert judge(nodes, reached)["c"] == (OK, "eth0 (10.0.0.2), reached by all other nodes")
    reached["b"]["c"] = ["no answer", ""]
    assert judge(nodes, reached)["c"] == (OK, "eth1 (10.1.0.2), reached by all other nodes")
    reached["b"]["c"] = ["no answer", "no route"]
    found = judge(nodes, reached)
    assert found["a"] == (OK, "eth0 (10.0.0.0), reached by all other nodes")
    assert found["c"].state is FAILED
    assert found["c"].text.startswith("eth0 (10.0.0.2) is not reached by b (no answer): open TCP ports 1-2 on this node")


def test_without_an_interface():
    nodes = {"a": node(machine="a"), "b": node("10.0.0.2", machine="b"), "c": node(machine="c", trouble="has no ib0")}
    reached = {"a": {"b": [""], "c": []}, "b": {"a": [], "c": []}, "c": {"a": [], "b": [""]}}
    found = judge(nodes, reached)
    assert found["a"].state is found["c"].state is FAILED and found["b"].state is OK
    assert "no IPv4 network interface that other nodes could reach" in found["a"].text
    assert found["c"].text == "it has no ib0: correct networkInterface in the cluster document"
