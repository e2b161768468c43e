//! The clusters of a target as a balancer saw them last, so that what is built from their names is built anew only when they change.
//!
//! *Invariant*: ids are sorted, as the clusters are; [`Members::generation`] changes whenever they do, and only then.
//! *Bound and cost*: with an unchanged version one comparison; with a changed one a comparison of all ids; a copy of them only when
//! they differ.
//! *Source*: the Stargate rules, sections 1.6 and 2.0.

use std::cmp::Ordering;

use super::stats::Cluster;

/// See the module's text.
#[derive(Debug, Default)]
pub struct Members {
    version: Option<u64>,
    ids: Vec<Box<str>>,
    generation: u64,
}

/// What looking at the clusters showed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The version is the one seen last.
    None,
    /// The version is another, the clusters are the same: only their figures moved.
    Figures,
    /// Others than before. By former index: the present one, if the cluster still is there.
    Clusters { moved: Vec<Option<u32>> },
}

impl Members {
    /// Takes note of the clusters, which are sorted by id.
    #[inline]
    pub fn look(&mut self, clusters: &[Cluster], version: u64) -> Change {
        if self.version == Some(version) {
            debug_assert!(self.ids.len() == clusters.len(), "clusters changed under one version");
            return Change::None;
        }
        self.version = Some(version);
        if self.ids.len() == clusters.len() && self.ids.iter().zip(clusters).all(|(id, now)| *id == now.id) {
            return Change::Figures;
        }
        self.replace(clusters)
    }

    #[cold]
    fn replace(&mut self, clusters: &[Cluster]) -> Change {
        debug_assert!(clusters.is_sorted_by(|a, b| a.id < b.id), "clusters are sorted by id, each once");
        let mut moved = Vec::with_capacity(self.ids.len());
        let mut at = 0;
        for id in &self.ids {
            while clusters.get(at).is_some_and(|cluster| cluster.id.cmp(id) == Ordering::Less) {
                at += 1;
            }
            let same = clusters.get(at).is_some_and(|cluster| cluster.id == *id);
            moved.push(same.then_some(at as u32));
        }
        self.ids.clear();
        self.ids.extend(clusters.iter().map(|cluster| cluster.id.clone()));
        self.generation += 1;
        Change::Clusters { moved }
    }

    /// Above 0 once there were clusters, and another number after each change.
    pub const fn generation(&self) -> u64 {
        self.generation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clusters(ids: &str) -> Vec<Cluster> {
        ids.chars().map(|id| Cluster { id: id.to_string().into(), ..Cluster::default() }).collect()
    }

    #[test]
    fn former_clusters_find_their_places() {
        let mut members = Members::default();
        assert_eq!(members.look(&clusters("bdf"), 1), Change::Clusters { moved: vec![] });
        assert_eq!(members.look(&clusters("bdf"), 1), Change::None);
        assert_eq!(members.look(&clusters("bdf"), 2), Change::Figures);
        let before = members.generation();
        let moved = vec![Some(1), None, Some(3)];
        assert_eq!(members.look(&clusters("abcfg"), 3), Change::Clusters { moved });
        assert_ne!(members.generation(), before);
        assert_eq!(members.look(&clusters(""), 4), Change::Clusters { moved: vec![None; 5] });
    }

    #[test]
    fn as_many_clusters_of_other_names_are_another_set() {
        let mut members = Members::default();
        let _ = members.look(&clusters("ab"), 1);
        assert_eq!(members.look(&clusters("ac"), 2), Change::Clusters { moved: vec![Some(0), None] });
    }
}
