//! What is said of a request for the log.
//!
//! *Bound and cost*: where the level of a line is not logged, one comparison; else the line's values are copied, once. Words are the
//! control thread's.
//! *Source*: the Stargate rules, section 7.

use super::super::client::Client;
use super::super::intake::Intake;
use super::super::session::Desk;
use super::aloft::Aloft;
use super::desk::Levels;
use super::endpoint::Proxied;
use super::headers::Headers;
use crate::clock::Nanos;
use crate::proto::ids::BackendId;
use crate::proto::stargate::flight::Facts;
use crate::proto::stargate::notice::{Span, StargateNotice, Subject};
use crate::proto::stargate::request::Refusal;

/// What is to be said of one request.
pub struct Told {
    endpoint: Proxied,
    arrived: Nanos,
    levels: Levels,
    /// Of the last attempt that had one; 0: none.
    upstream_status: u16,
    head_at: Option<Nanos>,
    retry_reason: Box<[u8]>,
    admission: &'static str,
    invalid_method: bool,
}

/// The request, as far as it is there.
pub struct Seen<'a> {
    pub client: &'a Client,
    pub desk: &'a Desk,
    pub intake: &'a Intake,
}

impl<'a> Seen<'a> {
    fn headers(&self) -> Headers<'a> {
        let options = &self.client.shard.trusted().options;
        Headers::read(&self.desk.head, self.intake.head(self.client), &options.retry_budget_header)
    }

    fn subject(&self) -> Subject {
        let headers = self.headers();
        Subject {
            routing_key: headers.routing_key().into(),
            model: headers.model().into(),
            requested_algorithm: headers.method().map(Into::into),
            // Nothing where it was no number.
            input_tokens: headers.wish(Nanos::ZERO, false).map_or(0, |wish| wish.input_tokens),
        }
    }

    fn say(&self, notice: StargateNotice) {
        self.client.shard.say(notice);
    }
}

impl Told {
    pub fn new(endpoint: Proxied, arrived: Nanos, levels: Levels) -> Told {
        Told {
            endpoint,
            arrived,
            levels,
            upstream_status: 0,
            head_at: None,
            retry_reason: Box::default(),
            admission: "",
            invalid_method: false,
        }
    }

    /// The router has accepted the request.
    pub fn opened(&self, seen: &Seen<'_>, aloft: &mut Aloft) {
        if !self.levels.info {
            return;
        }
        let built = aloft.with(|router, flight| {
            let facts = router.facts(flight);
            let (rebuilt, algorithm) = (facts.expression_built?, facts.algorithm);
            Some((rebuilt, algorithm, router.effective_json(flight)))
        });
        if let Some((rebuilt, algorithm, effective)) = built {
            let expression = seen.headers().method().unwrap_or_default().into();
            let effective = effective.into();
            seen.say(StargateNotice::ExpressionBuilt { algorithm, rebuilt, expression, effective });
        }
    }

    /// An attempt begins.
    pub fn attempt(&self, seen: &Seen<'_>, aloft: &mut Aloft, backend: BackendId) {
        if !self.levels.info {
            return;
        }
        let (server, url) = seen.client.shard.named(backend);
        let subject = seen.subject();
        let notice = aloft.with(|router, flight| {
            let facts = router.facts(flight);
            StargateNotice::Proxying {
                subject,
                algorithm: facts.algorithm,
                server,
                url,
                connect_retries: facts.connect_retries,
                request_retries: facts.request_retries,
            }
        });
        seen.say(notice);
    }

    /// A server has answered with that status.
    pub fn answered(&mut self, now: Nanos, status: u16) {
        (self.head_at, self.upstream_status) = (Some(now), status);
    }

    /// That answer may be tried elsewhere, and says why.
    pub fn retryable(&mut self, reason: &[u8]) {
        if self.levels.debug {
            self.retry_reason = reason.into();
        }
    }

    /// The body cannot be sent again.
    pub fn not_replayable(&self, seen: &Seen<'_>, backend: BackendId, overflow: bool) {
        if self.levels.warn {
            let (server, _) = seen.client.shard.named(backend);
            seen.say(StargateNotice::NotReplayable { subject: seen.subject(), server, overflow });
        }
    }

    /// The request gets no server.
    pub fn refused(&mut self, seen: &Seen<'_>, aloft: Option<&mut Aloft>, refusal: &Refusal) {
        match refusal {
            Refusal::InputWork { capacity: true } => self.admission = "input_work_capacity_unavailable",
            Refusal::InputWork { capacity: false } => self.admission = "input_work_limit_exceeded",
            Refusal::Method { .. } => self.invalid_method = true,
            _ => {}
        }
        if !self.levels.warn {
            return;
        }
        let facts = aloft.map(|aloft| aloft.with(|router, flight| router.facts(flight).clone()));
        let facts = facts.unwrap_or_default();
        let subject = seen.subject();
        seen.say(match refusal {
            Refusal::Method { code, message } => {
                StargateNotice::InvalidMethod { subject, code, message: message.as_str().into() }
            }
            Refusal::AffinityKeyMissing => StargateNotice::AffinityKeyMissing { subject },
            Refusal::NoTarget | Refusal::Unavailable => StargateNotice::NoCandidates {
                subject,
                failed_backends: facts.failed_backends,
                routing_retry_attempts: facts.routing_retry_attempts,
            },
            Refusal::InputWork { capacity } => StargateNotice::InputWork { subject, capacity: *capacity },
        });
    }

    /// The request has its answer, with that status for the client.
    pub fn span(&self, seen: &Seen<'_>, aloft: Option<&mut Aloft>, status: u16) {
        if !self.levels.debug {
            return;
        }
        let headers = seen.headers();
        let wish = headers.wish(Nanos::ZERO, false).unwrap_or_default();
        let mut span = Span {
            subject: seen.subject(),
            endpoint: self.endpoint.name(),
            path: seen.desk.head.path_and_query.of(seen.intake.head(seen.client)).into(),
            priority: wish.priority,
            max_wait_ms: wish.max_wait_ms.unwrap_or_default(),
            slo_ms: wish.slo_ms.unwrap_or_default(),
            cache_affinity_key_present: !wish.affinity_key.is_empty(),
            admission_rejection_reason: self.admission,
            invalid_requested_algorithm: self.invalid_method,
            upstream_status: self.upstream_status,
            status,
            time_to_first_byte_ns: self.head_at.map_or(0, |at| at.since(self.arrived)),
            retry_reason: self.retry_reason.clone(),
            replay_body_bytes: seen.intake.kept_bytes(),
            ..Span::default()
        };
        if let Some(aloft) = aloft {
            aloft.with(|router, flight| {
                span.facts = Facts::clone(router.facts(flight));
                if let Some((cluster, rtt_ns, stats)) = router.cluster_of(flight) {
                    (span.cluster, span.cluster_rtt_ns, span.stats) = (cluster.into(), rtt_ns, stats.clone());
                }
            });
            if let Some(dispatched) = span.facts.dispatched {
                span.server = seen.client.shard.named(dispatched.backend).0;
            }
        }
        seen.say(StargateNotice::Span(Box::new(span)));
    }
}
