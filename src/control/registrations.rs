//! Servers that register themselves over HTTP: who holds which id, by which lease, and until when.
//!
//! The first registration of an id opens it and is given a lease; whoever shows the lease renews it. An id that is not renewed in time
//! is closed, and free for anybody.
//!
//! *Invariant*: pure: no I/O and no clock; `now` is an argument. A live id has one holder. An id that comes back with the same URL and
//! cluster is the same server as before, so that its counters and slots go on.
//! *Bound and cost*: [`REGISTRATIONS_MAX`] live ids, O(log ids) per call. An identity that was is remembered, as its server's number is
//! never given to another: the caller bounds those.
//! *Errors*: [`Refused`].
//! *Source*: the configuration reference, admin API; the Stargate rules, section 8.2.

pub mod body;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};

use crate::clock::Nanos;
use crate::limits::REGISTRATIONS_MAX;
use crate::proto::ids::BackendId;
use body::Snapshot;

/// Why a registration, or the end of one, is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The id is live, and the lease is not its.
    Held,
    /// A configured server is called so.
    Configured,
    /// What may not change has changed, so the registration is closed: which field, and what it was.
    Moved { field: &'static str, was: Box<str> },
    /// There is room for no more of what it names.
    Full(&'static str),
    /// Nobody holds that id.
    Unknown,
}

/// A live registration.
#[derive(Clone, Debug, PartialEq)]
pub struct Registration {
    pub backend: BackendId,
    pub url: Box<str>,
    /// Never empty.
    pub cluster_id: Box<str>,
    pub routing_key: Box<str>,
    pub lease: Box<str>,
    pub ttl_ms: u64,
    pub expires: Nanos,
    /// By model: whether it takes requests, and whether the router has to ask the engine how busy it is.
    pub models: BTreeMap<Box<str>, Served>,
}

/// One model of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    pub active: bool,
    /// It reports how many requests run.
    pub reports_load: bool,
}

/// Id, URL and cluster.
type Identity = (Box<str>, Box<str>, Box<str>);

/// See the module's text.
#[derive(Debug)]
pub struct Registrations {
    live: BTreeMap<Box<str>, Registration>,
    /// Of the live ones, soonest first.
    expiries: BTreeSet<(Nanos, Box<str>)>,
    /// All that ever were, live or not.
    servers: HashMap<Identity, BackendId>,
    /// Keyed from the system's randomness.
    random: RandomState,
    leases: u64,
}

impl Default for Registrations {
    fn default() -> Self {
        Registrations {
            live: BTreeMap::new(),
            expiries: BTreeSet::new(),
            servers: HashMap::new(),
            random: RandomState::new(),
            leases: 0,
        }
    }
}

/// What a registration that is not refused does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Opens its id.
    Open,
    /// Renews it.
    Renew(BackendId),
}

impl Registrations {
    /// Judges a registration. After [`Refused::Moved`] the caller has to [`close`](Registrations::close) it.
    pub fn judge(&self, id: &str, snapshot: &Snapshot) -> Result<Step, Refused> {
        let Some(held) = self.live.get(id) else {
            // A lease of an id that has run out meanwhile is as good as none.
            return match self.live.len() < REGISTRATIONS_MAX {
                true => Ok(Step::Open),
                false => Err(Refused::Full("registrations")),
            };
        };
        if snapshot.lease.as_ref() != Some(&held.lease) {
            return Err(Refused::Held);
        }
        let url: Box<str> = snapshot.url.to_string().into();
        let cluster_id = cluster_of(id, snapshot);
        let fixed = [
            ("url", &held.url, &*url),
            ("cluster_id", &held.cluster_id, cluster_id),
            ("routing_key", &held.routing_key, &*snapshot.routing_key),
        ];
        match fixed.into_iter().find(|(_, was, is)| &***was != *is) {
            Some((field, was, _)) => Err(Refused::Moved { field, was: was.clone() }),
            None => Ok(Step::Renew(held.backend)),
        }
    }

    /// The server that this id, URL and cluster were before.
    pub fn former(&self, id: &str, snapshot: &Snapshot) -> Option<BackendId> {
        let key = (id.into(), snapshot.url.to_string().into(), cluster_of(id, snapshot).into());
        self.servers.get(&key).copied()
    }

    /// Opens an id that [`Registrations::judge`] said is free, as server `backend`.
    pub fn open(&mut self, now: Nanos, id: &str, snapshot: &Snapshot, backend: BackendId, ttl_ms: u64) {
        let registration = Registration {
            backend,
            url: snapshot.url.to_string().into(),
            cluster_id: cluster_of(id, snapshot).into(),
            routing_key: snapshot.routing_key.clone(),
            lease: self.new_lease(id),
            ttl_ms,
            expires: now.plus_ms(ttl_ms),
            models: served(snapshot),
        };
        let key = (id.into(), registration.url.clone(), registration.cluster_id.clone());
        self.servers.insert(key, backend);
        self.expiries.insert((registration.expires, id.into()));
        self.live.insert(id.into(), registration);
    }

    /// Renews a live id. Whether its models, or what they take, have changed.
    pub fn renew(&mut self, now: Nanos, id: &str, snapshot: &Snapshot, ttl_ms: u64) -> bool {
        let Some(held) = self.live.get_mut(id) else { return false };
        self.expiries.remove(&(held.expires, id.into()));
        held.ttl_ms = ttl_ms;
        held.expires = now.plus_ms(ttl_ms);
        self.expiries.insert((held.expires, id.into()));
        let models = served(snapshot);
        let changed = held.models != models;
        held.models = models;
        changed
    }

    /// Closes an id.
    pub fn close(&mut self, id: &str) -> Option<Registration> {
        let held = self.live.remove(id)?;
        self.expiries.remove(&(held.expires, id.into()));
        Some(held)
    }

    pub fn get(&self, id: &str) -> Option<&Registration> {
        self.live.get(id)
    }

    /// Live registrations with their ids, in the ids' order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Registration)> {
        self.live.iter().map(|(id, held)| (&**id, held))
    }

    /// When the next one runs out; [`Nanos::NEVER`]: none is live.
    pub fn deadline(&self) -> Nanos {
        self.expiries.first().map_or(Nanos::NEVER, |(expires, _)| *expires)
    }

    /// An id that has run out, to be closed; ask again until there is none.
    pub fn expired(&self, now: Nanos) -> Option<Box<str>> {
        self.expiries.first().filter(|(expires, _)| *expires <= now).map(|(_, id)| id.clone())
    }

    /// 128 bits that nobody can guess who has not seen them: a keyed hash of a counter.
    fn new_lease(&mut self, id: &str) -> Box<str> {
        self.leases += 1;
        let half = |part: u8| self.random.hash_one((self.leases, part, id));
        format!("{:016x}{:016x}", half(0), half(1)).into()
    }
}

/// The capacity domain that a registration names: its own where it names none.
pub fn cluster_of<'a>(id: &'a str, snapshot: &'a Snapshot) -> &'a str {
    if snapshot.cluster_id.is_empty() { id } else { &snapshot.cluster_id }
}

fn served(snapshot: &Snapshot) -> BTreeMap<Box<str>, Served> {
    let models = snapshot.models.iter();
    models
        .map(|(name, model)| {
            let reports_load = model.reported.num_running_queries.is_some();
            (name.clone(), Served { active: model.active, reports_load })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Nanos {
        Nanos::from_ms(ms)
    }

    fn snapshot(url: &str, extra: &str) -> Snapshot {
        let text = format!(
            "{{\"url\":\"{url}\",\"models\":{{\"m\":{{\"status\":\"active\",\"stats\":{{}}}}}}{extra}}}"
        );
        body::parse(text.as_bytes(), 300_000).unwrap()
    }

    fn open(book: &mut Registrations, now: Nanos, id: &str, snapshot: &Snapshot, backend: u16) -> Box<str> {
        assert_eq!(book.judge(id, snapshot), Ok(Step::Open));
        book.open(now, id, snapshot, BackendId(backend), 1000);
        book.get(id).unwrap().lease.clone()
    }

    #[test]
    fn a_live_id_is_renewed_by_its_lease_alone() {
        let mut book = Registrations::default();
        let mut first = snapshot("http://a:1", "");
        let lease = open(&mut book, ms(0), "a", &first, 3);
        assert!(lease.len() == 32 && lease.bytes().all(|b| b.is_ascii_hexdigit()), "{lease}");
        assert_eq!(book.judge("a", &first), Err(Refused::Held), "without a lease it is somebody else");
        first.lease = Some("0".into());
        assert_eq!(book.judge("a", &first), Err(Refused::Held));
        first.lease = Some(lease.clone());
        assert_eq!(book.judge("a", &first), Ok(Step::Renew(BackendId(3))));
        assert!(!book.renew(ms(900), "a", &first, 1000), "nothing else has changed");
        assert_eq!((book.deadline(), book.expired(ms(1899))), (ms(1900), None));
        let other = open(&mut book, ms(0), "b", &snapshot("http://b:1", ""), 4);
        assert_ne!(other, lease);
    }

    #[test]
    fn what_may_not_change_is_named() {
        let mut book = Registrations::default();
        let lease = open(&mut book, ms(0), "a", &snapshot("http://a:1", ",\"routing_key\":\"k\""), 3);
        for (url, extra, field, was) in [
            ("http://a:2", ",\"routing_key\":\"k\"", "url", "http://a:1"),
            ("http://a:1", ",\"routing_key\":\"k\",\"cluster_id\":\"c\"", "cluster_id", "a"),
            ("http://a:1", "", "routing_key", "k"),
        ] {
            let moved = Snapshot { lease: Some(lease.clone()), ..snapshot(url, extra) };
            assert_eq!(book.judge("a", &moved), Err(Refused::Moved { field, was: was.into() }));
            let stranger = snapshot(url, extra);
            assert_eq!(book.judge("a", &stranger), Err(Refused::Held), "a stranger closes nothing");
        }
        let spelt_out = snapshot("http://a:1/", ",\"routing_key\":\"k\",\"cluster_id\":\"a\"");
        let same = Snapshot { lease: Some(lease), ..spelt_out };
        assert_eq!(book.judge("a", &same), Ok(Step::Renew(BackendId(3))), "another spelling of the same");
    }

    #[test]
    fn an_id_that_ran_out_is_free_and_the_same_server_when_it_comes_back() {
        let mut book = Registrations::default();
        let first = snapshot("http://a:1", "");
        let lease = open(&mut book, ms(0), "a", &first, 3);
        open(&mut book, ms(500), "b", &snapshot("http://b:1", ""), 4);
        assert_eq!(book.expired(ms(999)), None);
        assert_eq!(book.expired(ms(1000)).as_deref(), Some("a"));
        assert_eq!(book.close("a").unwrap().backend, BackendId(3));
        assert_eq!((book.expired(ms(1000)), book.deadline()), (None, ms(1500)));
        assert!(book.close("a").is_none());
        let late = Snapshot { lease: Some(lease.clone()), ..first.clone() };
        assert_eq!(book.judge("a", &late), Ok(Step::Open), "its old lease does no harm");
        assert_eq!(book.former("a", &first), Some(BackendId(3)));
        assert_eq!(book.former("a", &snapshot("http://a:2", "")), None);
        assert_eq!(book.former("a", &snapshot("http://a:1", ",\"cluster_id\":\"c\"")), None);
        assert_ne!(open(&mut book, ms(2000), "a", &late, 3), lease, "every opening has a lease of its own");
    }

    #[test]
    fn a_renewal_says_whether_models_changed() {
        let mut book = Registrations::default();
        let first = snapshot("http://a:1", "");
        open(&mut book, ms(0), "a", &first, 3);
        let mut other = first.clone();
        other.models.get_mut("m").unwrap().reported.queue_size = Some(5);
        assert!(!book.renew(ms(1), "a", &other, 1000), "figures are no structure");
        other.models.get_mut("m").unwrap().active = false;
        assert!(book.renew(ms(2), "a", &other, 1000));
        other.models.clear();
        assert!(book.renew(ms(3), "a", &other, 1000) && book.get("a").unwrap().models.is_empty());
    }

    #[test]
    fn their_number_is_bounded() {
        let mut book = Registrations::default();
        let one = snapshot("http://a:1", "");
        for n in 0..REGISTRATIONS_MAX {
            book.open(ms(0), &n.to_string(), &one, BackendId(0), 1000);
        }
        assert_eq!(book.judge("more", &one), Err(Refused::Full("registrations")));
        book.close("0");
        assert_eq!(book.judge("more", &one), Ok(Step::Open));
    }
}
