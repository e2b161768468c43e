//! Words what shards have to say of requests on trusted listeners: the lines and fields that operators of that contract search for.
//!
//! *Invariant*: text that came from callers or servers is shown as it came where it is UTF-8; each line is one event, whatever is in it.
//! *Source*: the Stargate rules, section 7.

use std::borrow::Cow;

use tracing::{debug, info, warn};

use crate::proto::stargate::notice::{Span, StargateNotice, Subject};

/// Shown of a method that is no visible ASCII.
const UNREADABLE: &str = "<unreadable>";

fn text(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// `x-routing-method` as it came; empty: there was none.
fn requested(subject: &Subject) -> Cow<'_, str> {
    match &subject.requested_algorithm {
        Some(method) if method.iter().all(|b| matches!(b, b'\t' | b' '..=b'~')) => text(method),
        Some(_) => Cow::Borrowed(UNREADABLE),
        None => Cow::Borrowed(""),
    }
}

/// Logs one notice.
pub fn log(notice: &StargateNotice) {
    match notice {
        StargateNotice::Proxying { subject, algorithm, server, url, connect_retries, request_retries } => {
            info!(
                routing_key = %text(&subject.routing_key),
                model_id = %text(&subject.model),
                input_tokens = subject.input_tokens,
                requested_algorithm = %requested(subject),
                routing_algorithm = algorithm,
                inference_server_id = %server,
                inference_server_url = %url,
                connect_retries,
                request_retries,
                "proxying request"
            )
        }
        StargateNotice::InvalidMethod { subject, code, message } => warn!(
            routing_key = %text(&subject.routing_key),
            model_id = %text(&subject.model),
            requested_algorithm = %requested(subject),
            rejection_reason = code,
            error = %message,
            "invalid routing algorithm header"
        ),
        StargateNotice::ExpressionBuilt { algorithm, rebuilt, expression, effective } => info!(
            algorithm = %algorithm,
            outcome = %if *rebuilt { "rebuild" } else { "build" },
            expression = %text(expression),
            effective = %effective,
            "routing expression configuration built"
        ),
        StargateNotice::AffinityKeyMissing { subject } => warn!(
            routing_key = %text(&subject.routing_key),
            model_id = %text(&subject.model),
            requested_algorithm = %requested(subject),
            "missing cache affinity key for load-balanced proxy request"
        ),
        StargateNotice::NoCandidates { subject, failed_backends, routing_retry_attempts } => warn!(
            routing_key = %text(&subject.routing_key),
            model_id = %text(&subject.model),
            failed_backend_count = failed_backends,
            routing_retry_attempts,
            "no inference server candidates for routing target"
        ),
        StargateNotice::InputWork { subject, capacity } => warn!(
            routing_key = %text(&subject.routing_key),
            model_id = %text(&subject.model),
            input_tokens = subject.input_tokens,
            rejection_reason = match capacity {
                true => "input_work_capacity_unavailable",
                false => "input_work_limit_exceeded",
            },
            "rejecting request before routing due to input-work admission"
        ),
        StargateNotice::NotReplayable { subject, server, overflow } => warn!(
            routing_key = %text(&subject.routing_key),
            model_id = %text(&subject.model),
            inference_server_id = %server,
            overflow,
            "not retrying because request body replay buffer is incomplete"
        ),
        StargateNotice::Span(span) => log_span(span),
    }
}

fn log_span(span: &Span) {
    let (subject, facts, stats) = (&span.subject, &span.facts, &span.stats);
    let ms = |ns: u64| ns as f64 / 1e6;
    debug!(
        request.endpoint = span.endpoint,
        request.routing_key = %text(&subject.routing_key),
        request.model_id = %text(&subject.model),
        request.path = %text(&span.path),
        request.input_tokens = subject.input_tokens,
        request.priority = span.priority,
        request.max_wait_ms = span.max_wait_ms,
        request.slo_ms = span.slo_ms,
        request.cache_affinity_key_present = span.cache_affinity_key_present,
        routing.requested_algorithm = %requested(subject),
        routing.invalid_requested_algorithm = span.invalid_requested_algorithm,
        routing.algorithm = facts.algorithm,
        routing.num_candidates = facts.num_candidates,
        routing.sample_count_configured = facts.sample_count_configured,
        routing.sample_count_effective = facts.sample_count_effective,
        routing.comparator = facts.comparator,
        routing.rank_depth = facts.rank_depth,
        routing.selected_after_kv_free_tokens_skip = facts.selected_after_kv_skip,
        routing.retry_attempts = facts.routing_retry_attempts,
        routing.admission_rejection_reason = span.admission_rejection_reason,
        selected_cluster.id = %span.cluster,
        selected_inst.id = %span.server,
        selected_inst.output_tps = stats.output_tps,
        selected_inst.last_mean_input_tps = stats.last_mean_input_tps,
        selected_inst.max_output_tps = stats.max_output_tps,
        selected_inst.queue_size = stats.queue_size,
        selected_inst.queued_input_size = stats.queued_input_size,
        selected_inst.num_running_queries = stats.num_running_queries,
        selected_inst.max_engine_concurrency = stats.max_engine_concurrency,
        selected_inst.total_query_input_size = stats.total_query_input_size,
        selected_inst.kv_cache_capacity_tokens = stats.kv.capacity_tokens,
        selected_inst.kv_cache_used_tokens = stats.kv.used_tokens,
        selected_inst.kv_cache_free_tokens = stats.kv.free_tokens,
        selected_inst.rtt_ms = ms(span.cluster_rtt_ns),
        proxy.status = span.status,
        proxy.upstream_status = span.upstream_status,
        proxy.time_to_first_byte_ms = ms(span.time_to_first_byte_ns),
        proxy.attempt = facts.attempts,
        proxy.connect_attempts = facts.connect_retries,
        proxy.request_retries = facts.request_retries,
        proxy.failed_backends = facts.failed_backends,
        proxy.queue.expected_ms = facts.dispatched.and_then(|to| to.expected_queue_ms).unwrap_or_default(),
        proxy.retry_reason = %text(&span.retry_reason),
        proxy.replay_body_bytes = span.replay_body_bytes,
        "proxy_openai_request"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::ids::BackendId;
    use crate::proto::stargate::flight::Facts;
    use crate::proto::stargate::layout::SlotId;
    use crate::proto::stargate::request::Dispatched;
    use crate::proto::stargate::stats::Stats;
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// The line as an object.
    fn logged(notice: &StargateNotice) -> serde_json::Value {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .json()
            .flatten_event(true)
            .with_max_level(tracing::Level::DEBUG)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || log(notice));
        let bytes = lines.0.lock().unwrap().clone();
        serde_json::from_slice(&bytes).expect("one line")
    }

    fn subject() -> Subject {
        Subject {
            routing_key: (*b"key").into(),
            model: (*b"m").into(),
            requested_algorithm: Some((*b"Pulsar").into()),
            input_tokens: 7,
        }
    }

    #[test]
    fn an_attempt_says_where_it_goes() {
        let line = logged(&StargateNotice::Proxying {
            subject: subject(),
            algorithm: "pulsar",
            server: "gpu0".into(),
            url: "http://h:1".into(),
            connect_retries: 1,
            request_retries: 2,
        });
        let wanted = [
            ("message", serde_json::json!("proxying request")),
            ("level", "INFO".into()),
            ("routing_key", "key".into()),
            ("model_id", "m".into()),
            ("input_tokens", 7.into()),
            ("requested_algorithm", "Pulsar".into()),
            ("routing_algorithm", "pulsar".into()),
            ("inference_server_id", "gpu0".into()),
            ("inference_server_url", "http://h:1".into()),
            ("connect_retries", 1.into()),
            ("request_retries", 2.into()),
        ];
        for (field, value) in wanted {
            assert_eq!(line[field], value, "{field}");
        }
    }

    #[test]
    fn what_is_no_text_has_a_placeholder_and_no_line_breaks_out() {
        let subject = Subject {
            model: (*b"a\nb").into(),
            requested_algorithm: Some((*b"\xff").into()),
            ..Subject::default()
        };
        let message = "unknown".into();
        let line = logged(&StargateNotice::InvalidMethod { subject, code: "unknown_method", message });
        assert_eq!((&line["level"], &line["rejection_reason"]), (&"WARN".into(), &"unknown_method".into()));
        assert_eq!((&line["model_id"], &line["requested_algorithm"]), (&"a\nb".into(), &UNREADABLE.into()));
    }

    #[test]
    fn every_refusal_has_the_line_that_is_searched_for() {
        let server = "gpu0".into();
        let lines = [
            (
                StargateNotice::AffinityKeyMissing { subject: subject() },
                "missing cache affinity key for load-balanced proxy request",
            ),
            (
                StargateNotice::NoCandidates {
                    subject: subject(),
                    failed_backends: 2,
                    routing_retry_attempts: 3,
                },
                "no inference server candidates for routing target",
            ),
            (
                StargateNotice::InputWork { subject: subject(), capacity: false },
                "rejecting request before routing due to input-work admission",
            ),
            (
                StargateNotice::NotReplayable { subject: subject(), server, overflow: true },
                "not retrying because request body replay buffer is incomplete",
            ),
        ];
        for (notice, message) in lines {
            let line = logged(&notice);
            assert_eq!((&line["message"], &line["level"]), (&message.into(), &"WARN".into()));
            assert_eq!(line["model_id"], "m", "{message}");
        }
    }

    #[test]
    fn a_request_has_all_fields_of_its_span_in_one_line() {
        let dispatched =
            Dispatched { backend: BackendId(0), slot: SlotId(0), expected_queue_ms: Some(9), rank_depth: 2 };
        let span = Span {
            subject: subject(),
            endpoint: "responses",
            facts: Facts {
                algorithm: "pulsar",
                rank_depth: 2,
                dispatched: Some(dispatched),
                ..Facts::default()
            },
            cluster: "c1".into(),
            cluster_rtt_ns: 1_500_000,
            stats: Stats { queue_size: 4, ..Stats::default() },
            time_to_first_byte_ns: 2_500_000,
            ..Span::default()
        };
        let line = logged(&StargateNotice::Span(Box::new(span)));
        assert_eq!((&line["message"], &line["level"]), (&"proxy_openai_request".into(), &"DEBUG".into()));
        assert_eq!(line["request.endpoint"], "responses");
        assert_eq!(line["routing.rank_depth"], 2);
        assert_eq!(
            (&line["selected_cluster.id"], &line["selected_inst.queue_size"]),
            (&"c1".into(), &4.into())
        );
        assert_eq!(
            (&line["selected_inst.rtt_ms"], &line["proxy.time_to_first_byte_ms"]),
            (&1.5.into(), &2.5.into())
        );
        assert_eq!(
            (&line["proxy.queue.expected_ms"], &line["proxy.replay_body_bytes"]),
            (&9.into(), &0.into())
        );
    }
}
