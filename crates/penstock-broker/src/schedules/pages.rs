//! Pages of schedules, as clients list them.

use std::ops::Bound;

use penstock_message::{ScheduleInfo, ScheduleName, SchedulesPage, SchedulesQuery};
use penstock_schedule::Calendar;

use super::{Schedule, seed};
use crate::Broker;

/// Maximum number of schedules on a page.
const LISTED: usize = 500;

impl Broker {
    pub(crate) fn schedules_page(&self, query: &SchedulesQuery) -> SchedulesPage {
        let mut page = SchedulesPage::default();
        let first = query
            .after
            .as_ref()
            .map_or(Bound::Unbounded, Bound::Excluded);
        for (name, schedule) in self
            .state
            .schedules
            .all
            .range::<ScheduleName, _>((first, Bound::Unbounded))
        {
            let matches = query.app.as_ref().is_none_or(|app| *app == name.app)
                && query
                    .name
                    .as_ref()
                    .is_none_or(|wanted| *wanted == name.name);
            if !matches {
                continue;
            }
            if page.schedules.len() == LISTED {
                page.next = page.schedules.last().map(|last| last.name.clone());
                break;
            }
            let times = query.times.min(SchedulesQuery::TIMES_CAP);
            page.schedules
                .extend(self.describe_schedule(name, schedule, times));
        }
        page
    }

    fn describe_schedule(
        &self,
        name: &ScheduleName,
        schedule: &Schedule,
        times: u32,
    ) -> Option<ScheduleInfo> {
        let Schedule { head, progress, .. } = schedule;
        let plan = head.plan()?;
        let calendar = Calendar::new(&plan.timing, head.anchor, seed(name));
        let mut next = Vec::new();
        if let Ok(calendar) = &calendar
            && !head.is_paused
        {
            let mut after = progress.after.max(self.clocks.wall().saturating_sub(1));
            while next.len() < times as usize
                && let Some(time) = calendar.next(after)
            {
                next.push(calendar.due(time));
                after = time;
            }
        }
        Some(ScheduleInfo {
            name: name.clone(),
            timing: plan.timing.clone(),
            overlap: plan.overlap,
            catch_up: plan.catch_up,
            window_ms: plan.window_ms,
            queue: plan.queue.clone(),
            task: plan.message.task.clone(),
            is_paused: head.is_paused,
            is_set: head.set.is_some(),
            is_declared: head.declared.is_some(),
            trouble: calendar.err().unwrap_or_default(),
            next,
            last: progress.last,
            skipped: progress.skipped,
            is_running: progress
                .last
                .is_some_and(|(_, job)| self.state.is_unfinished(&job)),
            is_queued: progress.queued.is_some(),
            tally: progress.tally,
        })
    }
}
