//! Names that were used once do not stay in memory.

use super::*;

const NAMES: u32 = 100_000;
const HOUR_MS: u64 = 3_600_000;

impl MeasuredBroker {
    /// Publishes and runs one job for each of many queues or tasks.
    fn use_once(&mut self, name_of: impl Fn(u32) -> (String, String)) {
        for first in (0..NAMES).step_by(BATCH as usize) {
            let names: Vec<_> = (first..first + BATCH).map(&name_of).collect();
            let mut queues: Vec<String> = names.iter().map(|(queue, _)| queue.clone()).collect();
            queues.dedup();
            let jobs = names.into_iter();
            let jobs = jobs.map(|(queue, task)| self.job(queue, task)).collect();
            let mut delivered = deliveries(self.commit(jobs));
            delivered.extend(self.consume(queues));
            assert_eq!(delivered.len(), BATCH as usize, "all are handed out");
            let acks = delivered.into_iter().map(|delivery| Op::Ack {
                lease: delivery.lease,
                cost_us: 20,
            });
            self.commit(acks.collect());
        }
        self.consume(vec!["served".to_owned()]);
    }

    fn page(&mut self, limit: u32) -> StatusPage {
        let query = Query::Status(StatusQuery {
            limit,
            ..StatusQuery::default()
        });
        let mut outputs = self.turn(Input::Query {
            conn: CLIENT,
            id: 1,
            query,
        });
        match outputs.pop() {
            Some(Output::Answer {
                answer: Answer::Status(page),
                ..
            }) => page,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn names_used_once_take_little_and_are_forgotten_except_for_their_counts() {
    let _alone = COUNTS.lock().unwrap();
    let one = |what: &str| what.to_owned();
    let queues = |number| (format!("queue-{number:08}"), one("task"));
    let tasks = |number| (one("served"), format!("shop.tasks.task_{number:08}"));
    for is_of_queues in [true, false] {
        let mut world = MeasuredBroker::new(BrokerOptions::default());
        world.consume(vec![one("served")]);
        let before = in_use();
        match is_of_queues {
            true => world.use_once(queues),
            false => world.use_once(tasks),
        }
        let used = in_use() - before;
        let given = GIVEN.load(Relaxed);
        let page = world.page(10);
        let asked = GIVEN.load(Relaxed) - given;
        world.wait(HOUR_MS - 60_000);
        let others = world.page(10).status.others;
        assert_eq!((others.queues, others.tasks), (0, 0), "an hour is not over");
        world.wait(120_000);
        world.wait(HOUR_MS);
        let left = in_use().saturating_sub(before);
        println!(
            "{used} bytes in use by {NAMES} names, {left} left after an hour, {asked} for a page"
        );
        assert!(used < 40_000_000, "{used} bytes in use by {NAMES} names");
        assert!(left < 10_000_000, "{left} bytes left by {NAMES} names");
        assert!(asked < 64 << 10, "{asked} bytes for a page of ten names");
        assert!(page.status.queues.len() + page.status.tasks.len() == 10);

        let after = world.page(0);
        assert_eq!(after.next, None);
        let others = after.status.others;
        let counts = match is_of_queues {
            true => {
                assert_eq!(others.queues, u64::from(NAMES));
                others.of_queues
            }
            false => {
                assert_eq!(others.tasks, u64::from(NAMES));
                others.of_tasks
            }
        };
        let expected = u64::from(NAMES);
        assert_eq!(
            (counts.enqueued, counts.started, counts.succeeded),
            (expected, expected, expected)
        );
        assert!(after.status.tasks.is_empty());
        let served: Vec<&str> = (after.status.queues.iter())
            .map(|queue| queue.name.as_str())
            .collect();
        assert_eq!(served, ["served"]);
    }
}
