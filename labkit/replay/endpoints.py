"""What an endpoint says about itself (model, engine, settings, counters), and whether two may be compared."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.compare import Comparison, compare_runs
from labkit.engines.importing import Reader
from labkit.engines.metrics import SAMPLE
from labkit.engines.record import Record
from labkit.engines.roles import resolve_roles
from labkit.engines.server import Server, parse_launch
from labkit.errors import InputError
from labkit.provenance import digest, redact, without_folders

if TYPE_CHECKING:
    import httpx

_PAGES = ("/get_server_info", "/server_info?config_format=json", "/props", "/slots", "/version")
MAX_PAGE_BYTES, PAGE_TIMEOUT_S = 8 << 20, 10.0
_START = "process_start_time_seconds"


@dataclass
class Endpoint:
    """One arm. ``name``: its letter in rows and reports; the URL is kept in memory only.

    launch : tells one start of the server from another, as far as the server does.
    """

    name: str
    url: str
    server: Server
    models: list[str] = field(default_factory=list)
    command: str | None = None
    launch: str = ""
    has_metrics: bool = False
    max_context: int | None = None

    def settings(self) -> dict[str, Any]:
        """What the guard compares and the sidecar holds: no URL, no host, no folder."""
        server = self.server
        told = {name: without_folders(redact(value)) for name, value in sorted(server.args.items())}
        return {
            **{"engine": server.engine or None, "engine_version": server.version, "models": self.models},
            **{"args": told, "backends": server.named, "launch": self.command},
        }

    def columns(self) -> dict[str, Any]:
        """Columns that every row of this endpoint has."""
        server = self.server
        roles = {name: role.backend for name, role in resolve_roles(server).items()} if server.engine else {}
        known = {name: backend for name, backend in roles.items() if backend != "unknown"}
        k = server.number("num_speculative_tokens", "speculative_num_steps", "spec_draft_n_max")
        method = server.args.get("method") or server.args.get("speculative_algorithm") or server.args.get("spec_type")
        speculates = method not in (None, "none") or bool(k) or server.args.get("speculative") == "True"
        return {
            **{"endpoint": self.name, "engine": server.engine or None, "engine_version": server.version},
            **{"launch": self.launch, "target": self.models[0] if self.models else "unknown"},
            **{"drafter": method if speculates else None, "num_speculative_tokens": k},
            "arm": ("speculative" if speculates else "plain") if server.args else None,
            **{"verify_backend": known.get("verify"), "decode_backend": known.get("decode")},
            "kv_dtype": server.args.get("kv_cache_dtype"),
            "origin": "forced" if server.imposed else "measured",
        }


def connect(
    client: "httpx.Client", urls: Sequence[str], *, launches: Sequence[str] = (), model: str | None = None, run_id: str
) -> list[Endpoint]:
    """Ask every endpoint for its model, settings and metrics page.

    launches : the servers' launch lines, in the order of the URLs, where they do not tell their settings.

    Raises InputError: no server there; endpoints that serve different model names (their requests could not be the
    same bytes); as many launch lines as URLs or none.
    """
    if launches and len(launches) != len(urls):
        raise InputError(f"launch: wanted one line for each of {len(urls)} endpoints, got {len(launches)}")
    found = [_connect(client, chr(ord("a") + i), url.rstrip("/"), run_id) for i, url in enumerate(urls)]
    for endpoint, line in zip(found, launches, strict=False):
        server, _ = parse_launch(line, endpoint.server.version)
        endpoint.server.engine = endpoint.server.engine or server.engine
        endpoint.server.args = server.args | endpoint.server.args
        endpoint.command = without_folders(redact(line))
    served = [set(endpoint.models) for endpoint in found]
    if model is None:
        common = sorted(set.intersection(*served))
        if not common:
            names = "; ".join(f"{e.name}: {', '.join(e.models) or 'none told'}" for e in found)
            raise InputError(
                f"base-url: wanted one model name at all endpoints ({names}); give --model or serve one name"
            )
        model = common[0]
    for endpoint in found:
        endpoint.models = [model, *(other for other in endpoint.models if other != model)]
    return found


def _connect(client: "httpx.Client", name: str, url: str, run_id: str) -> Endpoint:
    import httpx

    base = url.removesuffix("/v1")
    endpoint = Endpoint(name, base, Server())
    try:
        listed = client.get(f"{base}/v1/models", timeout=PAGE_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise InputError(f"base-url: no server at {url}: {error}") from error
    content = _json(listed)
    for item in (content.get("data") or []) if isinstance(content, dict) else []:
        if isinstance(item, dict) and isinstance(item.get("id"), str):
            endpoint.models.append(item["id"])
            limit = item.get("max_model_len") or (item.get("meta") or {}).get("n_ctx")
            endpoint.max_context = int(limit) if isinstance(limit, int | float) and limit else endpoint.max_context
    for page in _PAGES:
        _take_page(endpoint, page, _json(_page(client, base + page)))
    text = scrape(client, endpoint)
    marks = [match[1] for line in text.splitlines() if (match := SAMPLE.match(line))]
    endpoint.has_metrics = bool(marks)
    endpoint.server.engine = endpoint.server.engine or (marks[0] if marks else "")
    started = next((line.split()[-1] for line in text.splitlines() if line.startswith(_START + " ")), None)
    endpoint.launch = digest([name, started]) if started else f"{run_id}-{name}"
    return endpoint


def _take_page(endpoint: Endpoint, page: str, content: Any) -> None:
    """What one page tells. llama.cpp's /props says no speculation even while drafting; its /slots are right."""
    server = endpoint.server
    if page == "/slots" and isinstance(content, list):
        speculates = any(isinstance(slot, dict) and slot.get("speculative") for slot in content)
        server.args |= {"speculative": str(speculates), "parallel": str(len(content))}
    elif not isinstance(content, dict) or not content:
        return
    elif page == "/props" and "default_generation_settings" in content:
        server.engine, server.version = "llamacpp", content.get("build_info")
        context = content["default_generation_settings"].get("n_ctx")
        endpoint.max_context = context or endpoint.max_context
        server.args |= {"context": str(context), "model_ftype": str(content.get("model_ftype"))}
        server.args["model_file"] = Path(str(content.get("model_path"))).name
    elif page == "/version" and isinstance(content.get("version"), str):
        server.engine, server.version = server.engine or "vllm", content["version"]
    elif page.startswith(("/get_server_info", "/server_info")):
        list(Reader().read_text(json.dumps(content), page, server))
        server.engine = server.engine or ("vllm" if "vllm_config" in content else "sglang")


def _page(client: "httpx.Client", url: str) -> Any:
    import httpx

    try:
        return client.get(url, timeout=PAGE_TIMEOUT_S)
    except httpx.HTTPError:  # a page that a server does not have
        return None


def _json(response: Any) -> Any:
    """The page's JSON value, an empty dict where it has none."""
    if response is None or response.status_code != 200 or len(response.content) > MAX_PAGE_BYTES:
        return {}
    try:
        return response.json()
    except ValueError:
        return {}


def scrape(client: "httpx.Client", endpoint: Endpoint) -> str:
    """The metrics page, empty where there is none."""
    response = _page(client, f"{endpoint.url}/metrics")
    return response.text if response is not None and response.status_code == 200 else ""


def counted_between(before: str, after: str) -> Record | None:
    """What the counters say ran between two scrapes; None where they tell nothing."""
    records = Reader().read_text(f"{before}\n{after}", "metrics")
    return next((record for record in records if record.scope == "run"), None)


def verdict(a: Endpoint, b: Endpoint, *, varying: str | None = None, allow: Sequence[str] = ()) -> Comparison:
    """The guard's verdict on two endpoints' settings: every difference, and which of them nobody asked for."""
    return compare_runs(a.settings(), b.settings(), varying=varying, allow=allow)
