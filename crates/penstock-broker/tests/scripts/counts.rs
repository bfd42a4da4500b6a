//! Counts of jobs by queue and by task, including those of forgotten queues.

use crate::script::check;

#[test]
fn each_outcome_of_a_job_is_counted_for_its_queue_and_its_task() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one task=t|publish two task=t|publish three task=t|publish four task=u|publish five task=v after=50 expires=100|publish six queue=mail task=u  -> a confirm 6
        counts                              -> queue default enqueued5 lately, queue mail enqueued1 lately, task t enqueued3 lately, task u enqueued2 lately, task v enqueued1 lately
        w hello                             -> w welcome 0
        w consume default 4                 -> w deliver one four two three
        w ack one; put one yes              -> w confirm 1
        w fail two class=ValueError message=bad  -> w confirm 2
        w move three next after=1000        -> w confirm 3
        wait 100                            ->
        w crash four reason=SIGSEGV         -> w confirm 4
        a cancel six                        -> a confirm 7 7:Ready
        counts                              -> queue default enqueued5+started4+succeeded1+failed1+retried1+expired1+crashed1 lately, queue mail enqueued1+cancelled1 lately, task t enqueued3+started3+succeeded1+failed1+retried1 lately, task u enqueued2+started1+cancelled1+crashed1 lately, task v enqueued1+expired1 lately
        # A person retries it.
        a retry two queue=mail              -> a confirm 8 8:Failed
        counts                              -> queue default enqueued5+started4+succeeded1+failed1+retried2+expired1+crashed1 lately, queue mail enqueued1+cancelled1 lately, task t enqueued3+started3+succeeded1+failed1+retried2 lately, task u enqueued2+started1+cancelled1+crashed1 lately, task v enqueued1+expired1 lately
        ",
    );
}

#[test]
fn a_queue_and_a_task_that_are_empty_for_an_hour_leave_their_counts_to_others() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one queue=once task=t|publish two queue=kept task=u|publish three queue=paused task=u|pause paused  -> a confirm 4
        w hello                             -> w welcome 0
        w consume once 1                    -> w deliver one@once
        w consume kept 1                    -> w deliver two@kept
        w ack one|ack two                   -> w confirm 2
        wait 50000                          -> notice: 1 unserved in paused for 3000
        counts                              -> queue kept enqueued1+started1+succeeded1 lately, queue once enqueued1+started1+succeeded1 lately, queue paused enqueued1 lately, task t enqueued1+started1+succeeded1 lately, task u enqueued2+started1+succeeded1 lately
        wait 3500000                        ->
        counts                              -> queue kept enqueued1+started1+succeeded1 lately none, queue once enqueued1+started1+succeeded1 lately none, queue paused enqueued1 lately none, task t enqueued1+started1+succeeded1 lately none, task u enqueued2+started1+succeeded1 lately none
        wait 70000                          ->
        # Served or configured queues stay, and so does a task with waiting jobs.
        counts                              -> others 1 queues enqueued1+started1+succeeded1 refused 0 and 1 tasks enqueued1+started1+succeeded1, queue kept enqueued1+started1+succeeded1 lately none, queue paused enqueued1 lately none, task u enqueued2+started1+succeeded1 lately none
        w bye                               ->
        a purge paused|resume paused        -> a confirm 6 5:operation-1
        wait 3500000                        ->
        counts                              -> others 1 queues enqueued1+started1+succeeded1 refused 0 and 1 tasks enqueued1+started1+succeeded1, queue kept enqueued1+started1+succeeded1 lately none, queue paused enqueued1+cancelled1 lately none, task u enqueued2+started1+succeeded1+cancelled1 lately none
        wait 120000                         ->
        counts                              -> others 2 queues enqueued2+started2+succeeded2 refused 0 and 1 tasks enqueued1+started1+succeeded1, queue paused enqueued1+cancelled1 lately none, task u enqueued2+started1+succeeded1+cancelled1 lately none
        # A name that is used again starts from zero.
        a publish four queue=once task=t    -> a confirm 7
        counts                              -> others 2 queues enqueued2+started2+succeeded2 refused 0 and 1 tasks enqueued1+started1+succeeded1, queue once enqueued1 lately, queue paused enqueued1+cancelled1 lately none, task t enqueued1 lately, task u enqueued2+started1+succeeded1+cancelled1 lately none
        # Counts start from zero with the broker, whose journal mentions all those names again.
        kill                                ->
        a hello                             -> a welcome 4, a confirm 7 5:operation-1
        counts                              -> queue kept none lately, queue once none lately, queue paused none lately, task t none lately, task u none lately
        ",
    );
}

#[test]
fn capacity_is_the_share_of_the_time_in_which_consumers_were_ready() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one task=t|publish two task=t|publish odd task=odd  -> a confirm 3
        capacity                            -> default none
        w hello                             -> w welcome 0
        w consume default 1 tasks=t         -> w deliver one
        # Job two waits until the consumer wants more. The moving average over 10 seconds begins now.
        wait 2000                           ->
        capacity                            -> default 0
        w ack one                           -> w confirm 1
        w consume default 1                 -> w deliver two
        # Jobs that no consumer can run do not count, and no others wait.
        wait 2000                           -> notice: 1 of odd and 0 others unknown in default
        capacity                            -> default 550
        wait 60000                          ->
        capacity                            -> default 1000
        # Waiting also ends when the job is cancelled, or while its queue is paused.
        a publish three task=t              -> a confirm 4
        wait 10000                          ->
        capacity                            -> default 367
        a cancel three                      -> a confirm 5 5:Ready
        wait 60000                          ->
        capacity                            -> default 998
        a publish four task=t|pause default -> a confirm 7
        wait 60000                          ->
        capacity                            -> default 1000
        a resume default                    -> a confirm 8
        wait 10000                          ->
        capacity                            -> default 368
        w bye                               ->
        capacity                            -> default none
        ",
    );
}
