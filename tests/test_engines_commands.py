"""`labkit diagnose`: its options, a served info page, stored runs."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from labkit.cli import main
from labkit.paths import RUNS
from tests.engine_logs import FLOOR, LAUNCH, log


@pytest.mark.parametrize("option", [("--engine-version", "banana"), ("--gpu", "H300"), ("--kv-dtype", "foo")])
def test_options_that_mean_nothing(capsys, option):
    assert main(["diagnose", "--launch", "vllm serve m", *option]) == 2
    error = capsys.readouterr().err
    assert option[0].strip("-") in error
    assert "h200-sxm" in error or option[0] != "--gpu"


def test_command_line(tmp_path, capsys):
    path = tmp_path / "s.log"
    path.write_text(log(ms_per_1k=20 * FLOOR))
    assert main(["diagnose", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slope_over_floor"][0] == pytest.approx(20, rel=0.05)
    assert main(["diagnose", str(path), "--recipe", "k-sweep"]) == 0
    assert "--speculative-num-draft-tokens 9" in capsys.readouterr().out
    assert main(["diagnose", "--launch", LAUNCH.format(4, 1, 24), "--engine-version", "0.5.21"]) == 1
    assert "hold 5 rows" in capsys.readouterr().out
    for arguments in (["diagnose"], ["diagnose", "no/such"], ["diagnose", "--base-url", "ftp://x"]):
        assert main(arguments) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


class Pages(BaseHTTPRequestHandler):
    def do_GET(self):
        info = {"version": "0.5.21", "attention_backend": "triton", "model_path": "org/Llama-3.3-70B-x"}
        info |= {"speculative_num_draft_tokens": 4, "internal_states": [{"avg_spec_accept_length": 2.8}]}
        page = json.dumps(info).encode()
        if self.path == "/metrics" and not self.server.gauge:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"sglang:spec_accept_length 2.8\n" if self.path == "/metrics" else page)

    def log_message(self, *arguments):
        pass


@pytest.mark.parametrize("gauge", [True, False])
def test_a_running_server_is_asked(capsys, gauge):
    httpd = HTTPServer(("127.0.0.1", 0), Pages)
    httpd.gauge = gauge
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    assert main(["diagnose", "--base-url", f"http://127.0.0.1:{httpd.server_port}", "--json"]) == 0
    httpd.shutdown()
    found = json.loads(capsys.readouterr().out)
    assert found["engine_version"] == "0.5.21"
    assert found["roles"]["verify"]["backend"] == "triton"
    assert found["bands"][0]["mean_acceptance_length"] == pytest.approx(2.8)
    assert found["bands"][0]["num_windows"] == 1
    assert any("since the start" in text for text in found["unknown"]) == (not gauge)


def test_recipe_from_the_info_of_a_running_server(capsys):
    httpd = HTTPServer(("127.0.0.1", 0), Pages)
    httpd.gauge = True
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{httpd.server_port}"
    assert main(["diagnose", "--base-url", url, "--recipe", "all-reject"]) == 0
    httpd.shutdown()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == (
        "SGLANG_SIMULATE_ACC_LEN=1.0 sglang serve --model-path org/Llama-3.3-70B-x --attention-backend triton "
        "--speculative-num-draft-tokens 4"
    )
    assert "sglang serve --model-path org/Llama-3.3-70B-x --attention-backend triton" in lines
    assert lines[-1].startswith("labkit replay --base-url")


def test_stored_attention_runs_are_diagnosed(capsys):
    assert main(["diagnose", str(RUNS / "attention"), "--json"]) == 1  # unsplit kernels are in it
    found = json.loads(capsys.readouterr().out)
    assert {row["backend"]: row["diagnosis"] for row in found}["triton_nosplit"] == "no KV split"
    assert main(["diagnose", str(RUNS / "attention")]) == 1
    assert "triton_nosplit: no KV split (measured): slope" in capsys.readouterr().out
    assert main(["diagnose", str(RUNS / "loop")]) == 2
