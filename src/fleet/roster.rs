//! Which model is served by whom, as it stands now: a picture that requests read without a lock
//! and that is drawn anew when something changed. No replica is asked here. To answer another
//! question about models, add a field that [`Roster::draw`] fills.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;

use super::models::{self, Card};
use super::options::Options;
use super::pool::Pool;
use super::replica::Replica;
use crate::names::{ModelName, ReplicaId};
use crate::telemetry::Metrics;

/// What the model is called, in metrics and logs, of a request that names none and needs none.
pub(super) const ANY_MODEL: &str = "any";

/// Where a request for a model goes.
#[derive(Debug)]
pub enum Resolved {
    /// To this pool. A replica may still be missing: then the pool has no choice to offer.
    Pool {
        /// The replicas of the model.
        pool: Arc<Pool>,
        /// The model's name at the engines.
        model: ModelName,
        /// The client used an alias: this name must be written into the body.
        rewrite: Option<ModelName>,
    },
    /// Nobody serves it, and nobody did.
    Unknown {
        /// What there is.
        known: Arc<[ModelName]>,
    },
    /// The client named none, and there are several.
    NeedsModel {
        /// What there is.
        known: Arc<[ModelName]>,
    },
    /// It may exist: no replica has told its models yet, or an alias points to it.
    NoReplica {
        /// What the client asked for, at its proper name.
        model: Option<ModelName>,
    },
}

/// See the module's text.
#[derive(Default)]
pub(super) struct Roster {
    pools: HashMap<ModelName, Arc<Pool>>,
    /// All replicas, for requests that name no model; its model's name is [`ANY_MODEL`].
    everyone: Option<Arc<Pool>>,
    /// Alias to model, chains followed.
    aliases: HashMap<ModelName, ModelName>,
    known: Option<Arc<[ModelName]>>,
    cards: HashMap<ModelName, Bytes>,
    list: Bytes,
    /// Some replica's models are known, be it from the config.
    informed: bool,
}

/// What a roster is drawn from.
pub(super) struct Drawing<'a> {
    pub(super) options: &'a Options,
    pub(super) replicas: &'a [Arc<Replica>],
    pub(super) metrics: &'a Arc<Metrics>,
    /// Seconds since 1970, shown where no engine has said when a model was made.
    pub(super) created: u64,
}

impl Roster {
    /// Draws the picture. Pools whose replicas are the same as in `former` are kept, with their
    /// turns.
    pub(super) fn draw(drawing: &Drawing<'_>, former: &Self) -> Self {
        let mut members: BTreeMap<ModelName, Vec<Arc<Replica>>> = BTreeMap::new();
        let mut informed = false;
        for replica in drawing.replicas {
            informed |= each_model(replica, |model| {
                members.entry(model.clone()).or_default().push(Arc::clone(replica));
            });
        }
        let cards = gather_cards(drawing, &members);
        let pools = members
            .into_iter()
            .map(|(model, replicas)| {
                let kept = former.pools.get(&model).filter(|pool| pool.is_of(&replicas));
                let pool = match kept {
                    Some(pool) => Arc::clone(pool),
                    None => Arc::new(Pool::new(model.clone(), replicas, drawing).with_all_series()),
                };
                (model, pool)
            })
            .collect();
        let mut roster = Self::assemble(drawing.options, pools, cards, informed);
        roster.everyone = Some(match &former.everyone {
            Some(pool) if pool.is_of(drawing.replicas) => Arc::clone(pool),
            _ => {
                let all = drawing.replicas.to_vec();
                Arc::new(Pool::new(ModelName::new(ANY_MODEL), all, drawing))
            }
        });
        roster
    }

    fn assemble(
        options: &Options,
        pools: HashMap<ModelName, Arc<Pool>>,
        cards: Vec<Card>,
        informed: bool,
    ) -> Self {
        let aliases: HashMap<ModelName, ModelName> = options
            .aliases
            .keys()
            .filter_map(|alias| Some((alias.clone(), options.alias_target(alias)?.clone())))
            .collect();
        let mut shown: Vec<Card> =
            cards.iter().filter(|card| !aliases.contains_key(&card.id)).cloned().collect();
        let mut renamed = Vec::new();
        for alias in options.aliases.keys() {
            let target = aliases.get(alias);
            let card = cards.iter().find(|card| Some(&card.id) == target);
            renamed.extend(card.map(|card| card.renamed(alias)));
        }
        let by_id = shown.iter().chain(&renamed);
        let by_id: HashMap<ModelName, Bytes> = by_id
            .map(|card| (card.id.clone(), Bytes::copy_from_slice(card.json.as_bytes())))
            .collect();
        if options.list_aliases {
            shown.extend(renamed);
        }
        let known: Vec<ModelName> = shown.iter().map(|card| card.id.clone()).collect();
        Self {
            pools,
            everyone: None,
            aliases,
            known: Some(known.into()),
            list: models::list(shown.iter()),
            cards: by_id,
            informed,
        }
    }

    /// Where a request for `model` goes. Names are compared byte for byte; an alias comes before
    /// a model of the same name.
    pub(super) fn resolve(&self, model: Option<&str>) -> Resolved {
        let Some(name) = model else { return self.resolve_nameless() };
        let target = self.aliases.get(name);
        let served = target.map_or(name, ModelName::as_str);
        match self.pools.get(served) {
            Some(pool) => Resolved::Pool {
                pool: Arc::clone(pool),
                model: pool.model().clone(),
                rewrite: target.cloned(),
            },
            None if target.is_some() || !self.informed => {
                Resolved::NoReplica { model: Some(ModelName::new(served)) }
            }
            None => Resolved::Unknown { known: self.known() },
        }
    }

    fn resolve_nameless(&self) -> Resolved {
        let mut pools = self.pools.values();
        match (pools.next(), pools.next()) {
            (Some(pool), None) => Resolved::Pool {
                pool: Arc::clone(pool),
                model: pool.model().clone(),
                rewrite: None,
            },
            (Some(_), Some(_)) => Resolved::NeedsModel { known: self.known() },
            (None, _) => Resolved::NoReplica { model: None },
        }
    }

    /// All replicas, whatever they serve.
    pub(super) fn everyone(&self) -> Resolved {
        match &self.everyone {
            Some(pool) => Resolved::Pool {
                pool: Arc::clone(pool),
                model: pool.model().clone(),
                rewrite: None,
            },
            None => Resolved::NoReplica { model: None },
        }
    }

    /// The body of `GET /v1/models`.
    pub(super) fn list(&self) -> Bytes {
        self.list.clone()
    }

    /// The body of `GET /v1/models/{id}`.
    pub(super) fn card(&self, id: &str) -> Option<Bytes> {
        self.cards.get(id).cloned()
    }

    /// All pools of models.
    pub(super) fn pools(&self) -> impl Iterator<Item = &Arc<Pool>> {
        self.pools.values()
    }

    /// Takes the counters of some replicas away, in all pools.
    pub(super) fn retire_series(&self, gone: impl Fn(&ReplicaId) -> bool) {
        for pool in self.pools.values().chain(&self.everyone) {
            pool.retire_series(&gone);
        }
    }

    /// Every model that a client may name.
    pub(super) fn known(&self) -> Arc<[ModelName]> {
        self.known.clone().unwrap_or_default()
    }
}

/// Calls `each` for the models of a replica: those of the config, else those it told last. Returns
/// whether they are known at all.
fn each_model(replica: &Replica, mut each: impl FnMut(&ModelName)) -> bool {
    if !replica.fixed_models().is_empty() {
        let mut seen = HashSet::new();
        replica.fixed_models().iter().filter(|model| seen.insert(*model)).for_each(each);
        return true;
    }
    match replica.state().cards().as_deref() {
        Some(cards) => {
            cards.iter().for_each(|card| each(&card.id));
            true
        }
        None => false,
    }
}

/// One card for each model, in the order of the config: that of the first replica that serves now,
/// else of the first that ever told.
fn gather_cards(
    drawing: &Drawing<'_>,
    members: &BTreeMap<ModelName, Vec<Arc<Replica>>>,
) -> Vec<Card> {
    let mut seen = HashSet::new();
    let mut gathered = Vec::with_capacity(members.len());
    for replica in drawing.replicas {
        each_model(replica, |model| {
            if !seen.insert(model.clone()) {
                return;
            }
            let servers = members.get(model).map_or(&[][..], Vec::as_slice);
            let live = servers.iter().filter(|one| one.state().can_serve());
            let card = live.chain(servers).find_map(|one| {
                let cards = one.state().cards();
                cards.as_ref()?.iter().find(|card| card.id == *model).cloned()
            });
            gathered.push(card.unwrap_or_else(|| Card::bare(model, drawing.created)));
        });
    }
    gathered
}
