//! The broker as its clients see it: scripts with the expected outputs, and random scripts.

mod anything;
mod cancels;
mod claims;
mod counts;
mod deadlines;
mod endings;
mod errbacks;
mod failed_jobs;
mod golden;
mod growing;
mod keys;
mod leases;
mod limits;
mod order;
mod progress;
mod purges;
mod queues;
mod relay;
mod replaced;
mod retried_groups;
mod schedules;
mod schedules_at_random;
mod script;
mod transactions;
mod waits;
mod workflows;
