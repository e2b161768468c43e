//! What each server was lately sent, as far as this shard knows: the memory behind kv-aware routing.
//!
//! Prompts come as chains of block identities: a block's identity covers all before it, so a server that holds block *i* of a
//! prompt holds its first *i* blocks in all likelihood. A *domain* is the servers of one pool; each has a bounded memory
//! of blocks, and the domain an index of who holds what, so that one pass over a prompt matches it with every server.
//!
//! Eviction is by fair share. An active client, that is one owning a block of the server, is guaranteed `capacity / active clients`
//! blocks. When a server's memory is full, the client with the most blocks gives up its oldest; of several with the most, the one whose
//! oldest block is oldest (then the lower id). So a client at or under its share loses nothing while another is over, one
//! alone holds everything, and where everyone has the same the order is that of use. A block is charged to the client that used it
//! last. A prompt counts as used from its tail to its head, all of it at once: its missing blocks push out others, never its own
//! head. Clients beyond one per eight blocks (at least 64) are charged together, as one: inventing more wins nothing further.
//!
//! Each shard has a replica, and records every prompt that any shard sent, in the order of the stamps (see [`Touch`]). A stamp that comes
//! late still finds its place: the latest decides a block's age and owner.
//!
//! *Invariant*: blocks per server never exceed its effective capacity, those that are announced aside (a sixteenth and 64 more), and
//! [`PrefixMemory::bytes`] never `bytes_max`, but for a moment while tables are made anew.
//! *Bound and cost*: at most 72 bytes per block of capacity and server in a domain of half a million blocks, and a few thousand per
//! server and domain: 34 reserved with the first prompt (the system gives pages as they are written), 4 for blocks that several
//! servers hold, 28 in the index as it grows (31 in a domain of 65,536 blocks, 49 in one of 4,096: parts fill unevenly), up to 6 for
//! clients; beyond 31 servers per domain 1 to 4 more. Where capacities add up to more than `bytes_max`, each is cut by the same factor,
//! a power of 15/16. In instructions per block (`benches/memory.rs`): a lookup 57 whatever the number of servers, a recording of blocks
//! that are held 34, of new ones that push out others about 275. A memory that is far larger than the processor's caches costs waits
//! instead: for a new block two cache lines of the index, its own and that of the one which goes, and both are asked for ahead. No
//! allocation per block. A change of capacities that are cut, and forgetting, take time in proportion to what is held (about 1 ms per
//! 65,536 blocks).
//! *Errors*: none; a server that was not configured remembers nothing.
//! *Source*: the Lifeboat rules, sections 5.2 to 5.7.

mod clients;
mod ends;
mod holders;
mod index;
#[expect(unsafe_code, reason = "the prefetch instruction")]
mod prefetch;
mod server;
mod touch;

use crate::clock::Nanos;
use crate::limits::TOUCH_BLOCKS_MAX;
use crate::proto::ids::{BackendId, ClientId, PoolId, ShardId};

pub use clients::CROWD;
pub use ends::Ends;
use holders::Holders;
use index::{Index, Level};
use server::{CAPACITY_MAX, ServerMemory};
pub use touch::{Touch, TouchKind, TouchStage};

/// No node, no client.
const NONE: u32 = u32::MAX;

/// Maps a random word to 0..`len` by its top bits.
#[inline]
fn reduce(random: u64, len: usize) -> usize {
    ((u128::from(random) * len as u128) >> 64) as usize
}

/// When and where a prompt was sent to its server. Later stamps win; of equal ones (a shard's clock stands still within a turn of its
/// loop) the one that is told later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    pub at: Nanos,
    pub shard: ShardId,
}

impl Stamp {
    const ZERO: Stamp = Stamp { at: Nanos::ZERO, shard: ShardId(0) };
}

/// A server and how many leading blocks of the prompt it holds, at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    pub backend: BackendId,
    pub blocks: u32,
}

/// One server's memory in figures. All blocks but `clients`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryFigures {
    /// Remembered now.
    pub held: u64,
    /// May be remembered: as configured, or less where `bytes_max` or the engine's reports say so.
    pub capacity: u64,
    pub configured: u64,
    /// Match already and wait to be recorded, beside what is held.
    pub announced: u64,
    /// That own at least one block.
    pub clients: u64,
    /// Evicted since the server's memory last started empty.
    pub evicted: u64,
}

#[derive(Debug)]
struct Member {
    domain: PoolId,
    slot: u16,
    configured: u32,
    /// See [`PrefixMemory::narrow`].
    narrowed: u32,
    memory: ServerMemory,
}

impl Member {
    fn narrow(&mut self) {
        let part = NARROWING.powi(self.narrowed as i32);
        self.memory.set_limit((f64::from(self.memory.capacity()) * part) as u32);
    }
}

/// What one step leaves of a server's memory: short reports, one by one, find an engine's size within a few hundred.
const NARROWING: f64 = 127.0 / 128.0;
/// (127/128)^530 is a 64th.
pub const NARROWED_MAX: u32 = 530;

/// The servers of one pool.
#[derive(Debug)]
struct Domain {
    index: Index,
    slots: Vec<Option<BackendId>>,
    /// Of the last lookup.
    levels: Vec<Level>,
}

/// See the module's text.
#[derive(Debug)]
pub struct PrefixMemory {
    bytes_max: usize,
    /// By server.
    members: Vec<Option<Box<Member>>>,
    /// By pool.
    domains: Vec<Option<Box<Domain>>>,
    /// The node of each block of the prompt being recorded.
    found: Box<[u32]>,
}

impl PrefixMemory {
    /// An empty replica that takes at most `bytes_max` bytes. Allocates nothing before a server is configured.
    pub fn new(bytes_max: usize) -> Self {
        PrefixMemory { bytes_max, members: Vec::new(), domains: Vec::new(), found: Box::default() }
    }

    /// Puts a server into a domain with a capacity in blocks (at most 2^24), or gives it another capacity, which evicts down to it.
    /// Another domain, or `None`, forgets what it held.
    pub fn configure(&mut self, server: BackendId, domain: Option<PoolId>, capacity_blocks: u32) {
        self.configure_all(std::iter::once((server, domain, capacity_blocks)));
    }

    /// As [`PrefixMemory::configure`], for many; what each may have within `bytes_max` is found out once.
    pub fn configure_all(&mut self, servers: impl Iterator<Item = (BackendId, Option<PoolId>, u32)>) {
        let mut changed = false;
        for (server, domain, capacity_blocks) in servers {
            changed |= self.place(server, domain, capacity_blocks);
        }
        if changed {
            self.fit();
        }
    }

    /// Notes what [`PrefixMemory::fit`] then puts in force. False: nothing is new.
    fn place(&mut self, server: BackendId, domain: Option<PoolId>, capacity_blocks: u32) -> bool {
        let at = server.index();
        let capacity = capacity_blocks.min(CAPACITY_MAX);
        if let Some(member) = self.members.get_mut(at).and_then(Option::as_mut) {
            if Some(member.domain) == domain {
                let changed = member.configured != capacity;
                member.configured = capacity;
                return changed;
            }
            self.remove(server);
            if domain.is_none() {
                return true;
            }
        }
        let Some(domain) = domain else { return false };
        if self.members.len() <= at {
            self.members.resize_with(at + 1, || None);
        }
        if self.domains.len() <= domain.index() {
            self.domains.resize_with(domain.index() + 1, || None);
        }
        if self.found.is_empty() {
            self.found = vec![NONE; TOUCH_BLOCKS_MAX].into_boxed_slice();
        }
        let of = self.domains[domain.index()].get_or_insert_with(|| {
            Box::new(Domain { index: Index::new(), slots: Vec::new(), levels: Vec::new() })
        });
        let slot = of.slots.iter().position(Option::is_none).unwrap_or_else(|| {
            of.slots.push(None);
            // At most one level per server: no lookup allocates.
            of.levels.reserve(of.slots.len());
            of.slots.len() - 1
        });
        of.slots[slot] = Some(server);
        // What is in force is set by `fit`.
        let memory = ServerMemory::new(0);
        self.members[at] =
            Some(Box::new(Member { domain, slot: slot as u16, configured: capacity, narrowed: 0, memory }));
        true
    }

    /// The server restarted, was replaced, or has another address: what it held is forgotten.
    pub fn forget(&mut self, server: BackendId) {
        if let Some((member, domain)) = self.member(server) {
            member.memory.clear(&mut domain.index, member.slot);
            domain.index.shrink();
        }
    }

    fn remove(&mut self, server: BackendId) {
        self.forget(server);
        let Some(member) = self.members[server.index()].take() else { return };
        let domain = &mut self.domains[member.domain.index()];
        if let Some(of) = domain {
            of.slots[usize::from(member.slot)] = None;
            if of.slots.iter().all(Option::is_none) {
                *domain = None;
            }
        }
    }

    /// A server with its domain.
    #[inline]
    fn member(&mut self, server: BackendId) -> Option<(&mut Member, &mut Domain)> {
        let member = self.members.get_mut(server.index())?.as_mut()?;
        let domain = self.domains[member.domain.index()].as_mut()?;
        Some((member, domain))
    }

    /// The engine turned out to hold less than its server was taken to: from the next new block on so many steps less
    /// ([`NARROWING`] each, at most [`NARROWED_MAX`]), oldest blocks first as ever. 0: all of the capacity.
    pub fn narrow(&mut self, server: BackendId, steps: u32) {
        if let Some(Some(member)) = self.members.get_mut(server.index()) {
            member.narrowed = steps.min(NARROWED_MAX);
            member.narrow();
        }
    }

    /// Gives each server the capacity that it may have within `bytes_max`.
    fn fit(&mut self) {
        let mut cut = Cut::default();
        while self.bytes_needed(cut) > self.bytes_max && cut.steps < Cut::STEPS_MAX {
            cut.steps += 1;
        }
        // Those that lose first, so that what they give back is there for those that win.
        for shrink in [true, false] {
            for member in self.members.iter_mut().flatten() {
                let capacity = cut.of(member.configured);
                let domain =
                    self.domains[member.domain.index()].as_mut().expect("a member's domain is there");
                if (capacity < member.memory.capacity()) == shrink {
                    member.memory.resize(capacity, &mut domain.index, member.slot);
                    member.narrow();
                }
            }
            for (pool, domain) in self.domains.iter_mut().enumerate() {
                let Some(domain) = domain else { continue };
                let blocks = domain_blocks(&self.members, pool, cut);
                domain.index.configure(domain.slots.len(), sets_max(blocks), blocks);
            }
        }
    }

    /// What all takes at most with capacities cut so.
    fn bytes_needed(&self, cut: Cut) -> usize {
        let members = self.members.iter().flatten();
        let servers: usize = members.map(|member| ServerMemory::bytes_max(cut.of(member.configured))).sum();
        let domains = self.domains.iter().enumerate().filter_map(|(pool, domain)| {
            let slots = domain.as_ref()?.slots.len();
            let blocks = domain_blocks(&self.members, pool, cut);
            Some(Index::bytes_max(blocks) + (sets_max(blocks) + 9) * Holders::set_bytes_max(slots))
        });
        self.fixed_bytes() + servers + domains.sum::<usize>()
    }

    fn fixed_bytes(&self) -> usize {
        let slots: usize = self.domains.iter().flatten().map(|domain| domain.slots.capacity()).sum();
        self.members.capacity() * size_of::<Option<Box<Member>>>()
            + self.members.iter().flatten().count() * size_of::<Member>()
            + self.domains.capacity() * size_of::<Option<Box<Domain>>>()
            + self.domains.iter().flatten().count() * size_of::<Domain>()
            + slots * size_of::<Option<BackendId>>()
            + self.domains.iter().flatten().map(|d| d.levels.capacity() * size_of::<Level>()).sum::<usize>()
            + self.found.len() * size_of::<u32>()
    }

    /// What it takes now, in bytes.
    pub fn bytes(&self) -> usize {
        self.fixed_bytes()
            + self.members.iter().flatten().map(|member| member.memory.bytes()).sum::<usize>()
            + self.domains.iter().flatten().map(|domain| domain.index.bytes()).sum::<usize>()
    }

    /// Finds which servers of the domain hold how many leading blocks, in one pass over the prompt whatever the number of
    /// servers; [`PrefixMemory::matches`] then tells.
    #[inline]
    pub fn find_matches(&mut self, domain: PoolId, blocks: &[u64]) {
        if let Some(Some(domain)) = self.domains.get_mut(domain.index()) {
            let Domain { index, levels, .. } = &mut **domain;
            index.lookup(blocks, levels);
        }
    }

    /// What was found last: every server that holds the first block, longest match first, of equals those first that were configured
    /// first. Costs only for those that are asked for.
    pub fn matches(&self, domain: PoolId) -> impl Iterator<Item = Match> + Clone {
        let domain = self.domains.get(domain.index()).and_then(Option::as_deref);
        domain.into_iter().flat_map(|Domain { slots, levels, .. }| {
            levels.iter().rev().flat_map(move |level| {
                let backends = level.slots().filter_map(|slot| slots[usize::from(slot)]);
                backends.map(|backend| Match { backend, blocks: level.blocks })
            })
        })
    }

    /// Leading blocks that the server is believed to hold.
    pub fn matched(&self, server: BackendId, blocks: &[u64]) -> u32 {
        let Some(Some(member)) = self.members.get(server.index()) else { return 0 };
        let Some(domain) = &self.domains[member.domain.index()] else { return 0 };
        member.memory.matched(&domain.index, member.slot, blocks)
    }

    /// The server was sent this prompt, and it will be recorded when its touch has settled: until then the leading [`TOUCH_BLOCKS_MAX`] blocks match already. Says how many leading blocks matched before.
    pub fn announce(&mut self, server: BackendId, blocks: &[u64]) -> u32 {
        let blocks = &blocks[..blocks.len().min(TOUCH_BLOCKS_MAX)];
        let Some(member) = self.members.get_mut(server.index()).and_then(Option::as_mut) else { return 0 };
        let Some(domain) = &mut self.domains[member.domain.index()] else { return 0 };
        member.memory.announce(&mut domain.index, member.slot, &mut self.found, blocks)
    }

    /// The server was sent this prompt, for `client`: its leading [`TOUCH_BLOCKS_MAX`] blocks are remembered, its head as the most
    /// recent of all, unless other touches are later. Says how many leading blocks were held before. The identities
    /// within a prompt differ from each other.
    pub fn record(&mut self, stamp: Stamp, server: BackendId, client: ClientId, blocks: &[u64]) -> u32 {
        let Some(member) = self.members.get_mut(server.index()).and_then(Option::as_mut) else { return 0 };
        let Some(domain) = &mut self.domains[member.domain.index()] else { return 0 };
        member.memory.record(&mut domain.index, member.slot, &mut self.found, stamp, client, blocks)
    }

    /// The server does not hold these blocks: forgets them there, but for those touched later than `stamp`, the stamp of the
    /// dispatch that showed it.
    pub fn drop_blocks(&mut self, stamp: Stamp, server: BackendId, blocks: &[u64]) {
        let Some((member, domain)) = self.member(server) else { return };
        member.memory.drop_blocks(&mut domain.index, member.slot, stamp, blocks);
    }

    /// Figures of a server; all 0 for one that is in no domain.
    pub fn figures(&self, server: BackendId) -> MemoryFigures {
        let Some(Some(member)) = self.members.get(server.index()) else { return MemoryFigures::default() };
        MemoryFigures {
            held: u64::from(member.memory.held()),
            capacity: u64::from(member.memory.limit()),
            configured: u64::from(member.configured),
            announced: u64::from(member.memory.announced()),
            clients: member.memory.clients.len() as u64,
            evicted: member.memory.evicted,
        }
    }

    /// Clients of a server with the blocks they own, in no particular order; [`CROWD`] stands for all that are not told
    /// apart. O(clients), for panels.
    pub fn clients(&self, server: BackendId) -> impl Iterator<Item = (ClientId, u32)> {
        let member = self.members.get(server.index()).and_then(Option::as_ref);
        member.into_iter().flat_map(|m| m.memory.clients.iter().map(|client| (client.id, client.blocks)))
    }
}

/// How far capacities are cut: (15/16)^steps. Steps, so that in a growing fleet most servers that come change nobody's.
#[derive(Clone, Copy, Debug, Default)]
struct Cut {
    steps: u32,
}

impl Cut {
    /// (15/16)^400 of 2^24 is nothing.
    const STEPS_MAX: u32 = 400;

    fn of(self, configured: u32) -> u32 {
        (f64::from(configured) * (15.0_f64 / 16.0).powi(self.steps as i32)) as u32
    }
}

/// Blocks that a domain's servers may hold together, announced ones included.
fn domain_blocks(members: &[Option<Box<Member>>], pool: usize, cut: Cut) -> usize {
    let members = members.iter().flatten().filter(|member| member.domain.index() == pool);
    members.map(|member| ServerMemory::blocks_max(cut.of(member.configured))).sum()
}

/// Different sets of holders that are kept apart, where that takes memory: prompts share theirs in runs.
fn sets_max(blocks: usize) -> usize {
    blocks / 16
}

#[cfg(test)]
mod tests;
