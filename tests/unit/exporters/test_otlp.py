from __future__ import annotations

import socket
import threading
from types import ModuleType
from typing import Any

import pytest

from kvlens.exporters import catalog
from kvlens.exporters.otlp import OtlpError, OtlpSink, endpoint_of
from kvlens.observer.schema import LedgerEvent


@pytest.fixture
def sink(no_otel: pytest.MonkeyPatch, otlp_receiver: Any) -> OtlpSink:
    """One that sends to the receiver; the test closes it."""
    no_otel.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", otlp_receiver.endpoint)
    made = OtlpSink.from_environment()
    assert made is not None
    return made


def named(spans: list[Any], name: str) -> list[Any]:
    return [span for span in spans if span.name == name]


def test_nothing_is_sent_without_an_endpoint(no_otel: pytest.MonkeyPatch) -> None:
    assert OtlpSink.from_environment() is None


@pytest.mark.parametrize("variable, value", [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")])
def test_a_signal_can_be_switched_off(no_otel: pytest.MonkeyPatch, variable: str, value: str) -> None:
    no_otel.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert endpoint_of("TRACES") == "http://127.0.0.1:4318"
    no_otel.setenv(variable, value)
    assert endpoint_of("TRACES") is None


def test_another_protocol_is_refused_with_what_to_set(no_otel: pytest.MonkeyPatch) -> None:
    no_otel.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    no_otel.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(OtlpError, match="set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"):
        OtlpSink.from_environment()


def test_a_request_is_one_trace_under_the_callers_span(
    sink: OtlpSink, otlp_receiver: Any, otlp: ModuleType, states: ModuleType
) -> None:
    sink.on_request_ended(states.a_timeline())
    sink.close()
    assert list(otlp_receiver.traces()) == [states.TRACE]
    spans = otlp_receiver.spans()
    (request,) = named(spans, "request")
    assert request.parent_span_id.hex() == "00f067aa0ba902b7"
    assert (request.start_time_unix_nano, request.end_time_unix_nano) == (10 * 10**9, 20 * 10**9)
    assert {span.parent_span_id for span in spans if span is not request} == {request.span_id}
    assert sorted(span.name for span in spans) == ["decode", "prefill", "prefill", "queue", "release", "request"]
    told = otlp.attributes(request.attributes)
    assert told["gen_ai.usage.input_tokens"] == 100 and told["gen_ai.usage.output_tokens"] == 8
    assert told["gen_ai.usage.cache_read.input_tokens"] == 20 and told["gen_ai.response.id"] == "cmpl-5"
    assert told["gen_ai.response.finish_reasons"] == ["length"] and told["kv.row"] == 5


def test_a_request_without_a_caller_begins_a_trace_of_its_own(
    sink: OtlpSink, otlp_receiver: Any, states: ModuleType
) -> None:
    sink.on_request_ended(states.a_timeline(traceparent=None))
    sink.on_request_ended(states.a_timeline(traceparent="nonsense"))
    sink.close()
    requests = named(otlp_receiver.spans(), "request")
    assert [span.parent_span_id for span in requests] == [b"", b""]
    assert len(otlp_receiver.traces()) == 2


def test_an_abort_is_an_error_that_says_why(sink: OtlpSink, otlp_receiver: Any, states: ModuleType) -> None:
    timeline = states.a_timeline(
        states.entry(10.0, "queued"), states.finished(12.0, "abort", 0, "client went away"), outcome="abort"
    )
    sink.on_request_ended(timeline)
    sink.close()
    (request,) = named(otlp_receiver.spans(), "request")
    assert request.status.code == 2 and request.status.message == "client went away"


def test_a_failed_check_is_a_span_event_and_a_log_record_of_that_span(
    sink: OtlpSink, otlp_receiver: Any, otlp: ModuleType, states: ModuleType
) -> None:
    failed = states.entry(
        14.0, "check_failed", row=5, generation=7, protected_tokens=0, committed_tokens=90, allocated_tokens=0,
        detail={"check": "reused-row-carries-kv", "hint": "the row was released"},
    )  # fmt: skip
    sink.on_request_ended(states.a_timeline(states.scheduled(11.0, 0), failed, states.finished(20.0)))
    sink.close()
    (request,) = named(otlp_receiver.spans(), "request")
    (event,) = request.events
    assert event.name == "check_failed" and event.time_unix_nano == 14 * 10**9
    assert otlp.attributes(event.attributes)["kvlens.check"] == "reused-row-carries-kv"
    (record,) = otlp_receiver.logs()
    assert (record.trace_id, record.span_id) == (request.trace_id, request.span_id)
    assert record.event_name == "kvlens.check_failed" and record.severity_number == 17
    assert "reused-row-carries-kv" in record.body.string_value
    assert otlp.attributes(record.attributes)["kv.allocated_tokens"] == 0


def test_findings_and_checks_of_no_request_are_log_records(
    sink: OtlpSink, otlp_receiver: Any, otlp: ModuleType, states: ModuleType
) -> None:
    finding = {
        "id": "0123456789ab", "kind": "orphan_row", "severity": "critical", "pool": "full", "leaked_slots": 40,
        "leaked_rows": 1, "request_id": "cmpl-5", "row": 5, "generation": 7, "runbook": "docs/runbooks/orphan-row.md",
        "summary": "row 5 is held by nobody",
    }  # fmt: skip
    check = {"check": "free-slots-unique", "hint": "twice", "request": 0, "row": -1, "generation": -1}
    of_a_request = check | {"request": 5}  # told beside its trace
    sink.on_event(LedgerEvent(1.0, "engine", "finding_opened", finding))
    sink.on_event(LedgerEvent(2.0, "engine", "check_failed", check))
    sink.on_event(LedgerEvent(2.0, "engine", "check_failed", of_a_request))
    sink.on_event(LedgerEvent(3.0, "engine", "finding_resolved", finding))
    sink.on_event(LedgerEvent(3.0, "engine", "frames_lost", {"frames": 3}))
    sink.close()
    records = otlp_receiver.logs()
    assert [record.event_name for record in records] == [
        "kvlens.finding_opened", "kvlens.check_failed", "kvlens.finding_resolved",
    ]  # fmt: skip
    assert [record.severity_number for record in records] == [17, 17, 9]
    assert otlp.attributes(records[0].attributes)["kvlens.finding.id"] == "0123456789ab"
    assert "kv.row" not in otlp.attributes(records[1].attributes)


def test_every_metric_of_the_catalogue_is_sent_with_the_values_of_the_state(
    sink: OtlpSink, otlp_receiver: Any, otlp: ModuleType, states: ModuleType
) -> None:
    engine = states.tallies(
        states.a_leaking_engine(),
        histograms=states.an_engine().tallies.histograms
        | {"queue_seconds": states.a_histogram((1, 3, 4), 7.25, (0.5, states.TRACE))},
    )
    sink.on_state(states.a_state(engine))
    sink.close()
    sent = otlp_receiver.metrics()
    assert set(sent) == {metric.otel_name for metric in catalog.METRICS}
    for metric in catalog.METRICS:
        assert sent[metric.otel_name].unit == metric.otel_unit
    points = {
        otlp.attributes(point.attributes)["state"]: point.as_int
        for point in sent["kvlens.pool_slots"].gauge.data_points
    }
    assert points["unaccounted"] == 40 and sum(points.values()) == 1000
    assert sent["kvlens.requests"].sum.is_monotonic
    (queue,) = sent["kvlens.queue"].histogram.data_points
    assert list(queue.bucket_counts) == [1, 2, 1] and list(queue.explicit_bounds) == [0.1, 1.0]
    assert queue.count == 4 and queue.sum == 7.25 and not queue.HasField("min")
    assert queue.exemplars[0].trace_id.hex() == states.TRACE and queue.exemplars[0].as_double == 0.5


def test_the_resource_names_the_service_and_the_environment_goes_first(
    no_otel: pytest.MonkeyPatch, otlp_receiver: Any, states: ModuleType
) -> None:
    no_otel.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", otlp_receiver.endpoint)
    for attributes, name, expected in (("", "", "kvlens"), ("service.name=a,x=y", "", "a"), ("", "b", "b")):
        no_otel.setenv("OTEL_RESOURCE_ATTRIBUTES", attributes)
        no_otel.setenv("OTEL_SERVICE_NAME", name)
        sink = OtlpSink.from_environment()
        assert sink is not None
        sink.on_request_ended(states.a_timeline())
        sink.close()
        resource = otlp_receiver.resources()[-1]
        assert resource["service.name"] == expected
        assert resource["service.version"] and resource["service.instance.id"]


def test_traces_can_go_without_metrics_and_logs(
    no_otel: pytest.MonkeyPatch, otlp_receiver: Any, states: ModuleType
) -> None:
    no_otel.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{otlp_receiver.endpoint}/v1/traces")
    sink = OtlpSink.from_environment()
    assert sink is not None
    sink.on_state(states.a_state())
    sink.on_request_ended(states.a_timeline())
    sink.close()
    assert otlp_receiver.spans() and not otlp_receiver.metrics() and not otlp_receiver.logs()


def test_a_collector_that_never_answers_holds_nobody_up(no_otel: pytest.MonkeyPatch, states: ModuleType) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        no_otel.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        no_otel.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        no_otel.setattr("kvlens.exporters.otlp.CLOSE_SECONDS", 0.2)
        sink = OtlpSink.from_environment()
        assert sink is not None
        done = threading.Event()

        def live() -> None:
            for _ in range(1000):
                sink.on_request_ended(states.a_timeline())
            sink.close()
            done.set()

        threading.Thread(target=live, daemon=True).start()
        assert done.wait(20)  # left to the SDK, shutting down takes 30 s
        # What was left behind ends here: the SDK's retries draw random numbers, which other tests would notice.
        for thread in threading.enumerate():
            if thread.name == "kvlens-otlp-close":
                thread.join(30)
