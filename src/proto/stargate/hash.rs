//! Where keys and clusters lie: the byte strings of affinity hashes, and their XXH3.
//!
//! A field is its tag, the byte 0xFF, its length as 64 bits little-endian, its bytes. A string is the byte 1 and the fields `seed`,
//! `routing_key` and `model_id`, then:
//!
//! | hash of | further fields |
//! | --- | --- |
//! | a key at a cluster | `cache_affinity_key`, `cluster_id` |
//! | a key on the ring | `cache_affinity_key` |
//! | a node of the ring | `cluster_id`, `virtual_node` (its number, 64 bits little-endian) |
//!
//! *Invariant*: other routers with the same configuration compute the same hashes, to the last bit.
//! *Bound and cost*: one buffer per balancer. What strings have in common stays in it: a key is written once for all clusters, a
//! cluster once for all its nodes. XXH3 in one go over the buffer is cheaper than its streaming form up to some kilobytes of key, which is
//! what keys have: the streaming state is larger than they are.
//! *Source*: the Stargate rules, section 2.6; the XXH3 specification.

use twox_hash::XxHash3_64;

/// Begins all hashed strings of one target and seed, and holds the string at hand.
#[derive(Clone, Debug)]
pub struct Text {
    bytes: Vec<u8>,
    /// Where the common beginning ends.
    base: usize,
    /// Where what the present key or cluster adds to it ends.
    subject: usize,
}

impl Text {
    pub fn new(seed: &[u8], routing_key: &[u8], model: &[u8]) -> Text {
        let mut text = Text { bytes: vec![1], base: 0, subject: 0 };
        text.field(b"seed", seed);
        text.field(b"routing_key", routing_key);
        text.field(b"model_id", model);
        text.base = text.bytes.len();
        text.subject = text.base;
        text
    }

    #[inline]
    fn field(&mut self, tag: &[u8], value: &[u8]) {
        self.bytes.extend_from_slice(tag);
        self.bytes.push(0xff);
        self.bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
        self.bytes.extend_from_slice(value);
    }

    fn set_subject(&mut self, tag: &[u8], value: &[u8]) {
        self.bytes.truncate(self.base);
        self.field(tag, value);
        self.subject = self.bytes.len();
    }

    fn hash_with(&mut self, tag: &[u8], value: &[u8]) -> u64 {
        self.bytes.truncate(self.subject);
        self.field(tag, value);
        XxHash3_64::oneshot(&self.bytes)
    }

    /// Takes an affinity key (empty: none) and gives its position on the ring.
    pub fn key(&mut self, key: &[u8]) -> u64 {
        self.set_key(key);
        XxHash3_64::oneshot(&self.bytes)
    }

    /// Takes an affinity key, for [`Text::key_at`].
    pub fn set_key(&mut self, key: &[u8]) {
        self.set_subject(b"cache_affinity_key", key);
    }

    /// The hash of the key taken last at a cluster.
    pub fn key_at(&mut self, cluster_id: &str) -> u64 {
        self.hash_with(b"cluster_id", cluster_id.as_bytes())
    }

    /// Takes a cluster, for [`Text::node`].
    pub fn set_cluster(&mut self, cluster_id: &str) {
        self.set_subject(b"cluster_id", cluster_id.as_bytes());
    }

    /// The position of the node with that number of the cluster taken last.
    pub fn node(&mut self, number: u64) -> u64 {
        self.hash_with(b"virtual_node", &number.to_le_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seed: &str, routing_key: &str, model: &str, key: &str, cluster: &str) -> u64 {
        let mut text = Text::new(seed.as_bytes(), routing_key.as_bytes(), model.as_bytes());
        text.set_key(key.as_bytes());
        text.key_at(cluster)
    }

    #[test]
    fn the_string_is_laid_out_to_the_byte() {
        let mut text = Text::new(b"seed-1", b"rk-1", b"model-a");
        text.set_key(b"prefix-123");
        text.key_at("inst-a");
        let hex: String = text.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            "0173656564ff0600000000000000736565642d31726f7574696e675f6b6579ff0400000000000000726b2d316d6f64656c5f\
             6964ff07000000000000006d6f64656c2d6163616368655f616666696e6974795f6b6579ff0a000000000000007072656669782d\
             313233636c75737465725f6964ff0600000000000000696e73742d61"
        );
        assert_eq!(text.bytes.len(), 130);
    }

    #[test]
    fn keys_at_clusters() {
        let k300 = "k".repeat(300);
        let cases = [
            ("seed-1", "rk-1", "model-a", "prefix-123", "inst-a", 0x1944_3c44_ec9f_8abf),
            ("seed-1", "rk-1", "model-a", "prefix-123", "inst-b", 0xd4fa_425e_6669_b08c),
            ("seed-1", "rk-1", "model-a", "prefix-123", "inst-c", 0x00dc_dca7_7d80_cc0a),
            ("", "", "model-a", "", "inst-a", 0x079b_3ab6_d100_c655),
            ("seed-1", "", "model-a", "prefix-123", "inst-a", 0x2746_c531_4711_ba9c),
            ("seed-2", "rk-1", "model-a", "prefix-123", "inst-a", 0xab21_e15e_39bc_0b7c),
            ("seed-1", "rk-1", "model-b", "prefix-123", "inst-a", 0xda4b_1651_293c_4775),
            ("stable-a", "fn-1", "llama", "session-0", "cluster-0", 0xe6eb_ff7d_f8a8_abb3),
            ("stable-a", "fn-1", "llama", "session-0", "cluster-1", 0xa4c3_5725_b312_bf62),
            ("stable-a", "fn-1", "llama", "session-0", "cluster-2", 0x4db2_2118_c9de_ab48),
            ("stable-a", "fn-1", "llama", "session-0", "cluster-3", 0xd882_ac5e_9419_f655),
            ("s", "r", "m", k300.as_str(), "c", 0x8f0c_fa09_3229_c115),
            ("", "", "m", "é", "c", 0x58d1_a835_9a2e_5ae5),
        ];
        for (seed, routing_key, model, key, cluster, hash) in cases {
            assert_eq!(
                at(seed, routing_key, model, key, cluster),
                hash,
                "{seed} {routing_key} {key} {cluster}"
            );
        }
    }

    #[test]
    fn keys_on_the_ring() {
        let cases = [
            ("seed-1", "rk-1", "model-a", "prefix-123", 0x8b30_4ca8_ed1e_4a8a),
            ("seed-1", "", "model-a", "prefix-123", 0x8894_e560_d41b_bcbd),
            ("", "", "model-a", "k", 0x9ec5_91ec_6831_1290),
            ("test-seed", "", "m", "stable-prefix", 0x3eaa_46c7_fb50_c1ba),
        ];
        for (seed, routing_key, model, key, hash) in cases {
            let mut text = Text::new(seed.as_bytes(), routing_key.as_bytes(), model.as_bytes());
            // What was hashed before leaves no trace.
            text.set_cluster("other");
            text.node(1);
            assert_eq!(text.key(key.as_bytes()), hash, "{seed} {routing_key} {key}");
        }
    }

    #[test]
    fn nodes_of_the_ring() {
        let cases = [
            ("seed-1", "rk-1", "model-a", "inst-a", 0, 0x0d0c_bc68_125d_10c4),
            ("seed-1", "rk-1", "model-a", "inst-a", 1, 0x5892_eebf_f19b_c344),
            ("seed-1", "rk-1", "model-a", "inst-a", 149, 0x2066_2e0b_69f5_96a2),
            ("seed-1", "rk-1", "model-a", "inst-b", 0, 0x50b1_2c5f_5c5f_97c9),
            ("", "", "model-a", "c", 0, 0xb8de_ed6f_cfd0_f833),
            ("test-seed", "", "m", "a", 7, 0x1912_fc78_e520_f1f5),
        ];
        for (seed, routing_key, model, cluster, number, hash) in cases {
            let mut text = Text::new(seed.as_bytes(), routing_key.as_bytes(), model.as_bytes());
            text.set_cluster("other");
            text.set_cluster(cluster);
            text.node(number + 1);
            assert_eq!(text.node(number), hash, "{seed} {cluster} {number}");
        }
    }
}
