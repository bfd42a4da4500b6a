//! Questions to workers: each is answered once, and leaves nothing behind.

use crate::script::check;

#[test]
fn a_question_goes_to_the_worker_of_that_name_and_its_reply_comes_back() {
    check(
        "
        a hello                     -> a welcome 0
        w hello                     -> w welcome 0
        v hello                     -> v welcome 0
        w report 4 1 asks           ->
        v report 4 1 asks           ->
        a ask w ping                -> w asked 1:ping
        # No other client can answer, and nothing is answered twice.
        v reply 1 no                ->
        a reply 1 no                ->
        w reply 1 pong              -> a hears pong
        w reply 1 pong              ->
        w reply 2 pong              ->
        # A worker may ask itself.
        w ask w self                -> w asked 2:self
        w reply 2 yes               -> w hears yes
        ",
    );
}

#[test]
fn a_question_that_can_reach_nobody_says_why() {
    check(
        "
        a hello                     -> a welcome 0
        a ask w ping                -> a hears nothing: UnknownWorker
        # A client with that name is no worker.
        w hello                     -> w welcome 0
        a ask w ping                -> a hears nothing: UnknownWorker
        # Nor can a worker be asked before its first report.
        w consume default 1         ->
        a ask w ping                -> a hears nothing: UnknownWorker
        # A worker that does not mention questions is too old for them.
        w report 4 1                ->
        a ask w ping                -> a hears nothing: TooOld
        w report 4 1 asks           ->
        u hello as=w                -> u welcome 0
        u report 4 1 asks           ->
        a ask w ping                -> a hears nothing: SeveralWorkers
        u bye                       ->
        a ask w ping                -> w asked 1:ping
        a ask w MiB:4               -> a hears nothing: TooLarge
        w reply 1 MiB:4             -> a hears nothing: TooLarge
        w lost                      ->
        a ask w ping                -> a hears nothing: UnknownWorker
        ",
    );
}

#[test]
fn a_question_ends_with_the_connection_of_either() {
    check(
        "
        a hello                     -> a welcome 0
        w hello                     -> w welcome 0
        w report 4 1 asks           ->
        a ask w ping                -> w asked 1:ping
        w lost                      -> a hears nothing: Lost
        w hello                     -> w welcome 0
        w reply 1 pong              ->
        w report 4 1 asks           ->
        a ask w ping                -> w asked 2:ping
        a lost                      ->
        a hello                     -> a welcome 0
        w reply 2 pong              ->
        # A question that has not been sent ends with its asker.
        w writable no               ->
        a ask w ping                ->
        a lost                      ->
        w writable yes              ->
        a hello                     -> a welcome 0
        a ask w ping                -> w asked 4:ping
        # A reply to a question that was never sent is ignored.
        w writable no               ->
        a ask w ping                ->
        w reply 5 pong              ->
        w writable yes              -> w asked 5:ping
        ",
    );
}

#[test]
fn a_worker_that_does_not_reply_in_time_is_not_waited_for() {
    check(
        "
        a hello                     -> a welcome 0
        w hello                     -> w welcome 0
        w report 4 1 asks           ->
        a ask w ping for=500        -> w asked 1:ping
        a ask w ping                -> w asked 2:ping
        a ask w ping for=600000     -> w asked 3:ping
        wait 499                    ->
        wait 1                      -> a hears nothing: Silent
        w reply 1 late              ->
        # One minute is the maximum.
        wait 59499                  ->
        wait 1                      -> a hears nothing: Silent, a hears nothing: Silent
        # A full disk does not delay questions.
        disk no-settlements         -> notice: NoSettlements
        a ask w ping for=500        -> w asked 4:ping
        wait 500                    -> a hears nothing: Silent
        ",
    );
}

#[test]
fn questions_under_way_are_bounded_in_number() {
    check(
        "
        a hello                     -> a welcome 0
        b hello                     -> b welcome 0
        w hello                     -> w welcome 0
        w report 4 1 asks           ->
        w writable no               ->
        a ask w 1                   ->
        a ask w 2                   ->
        b ask w 3                   ->
        b ask w 4                   ->
        a ask w 5                   -> a hears nothing: Busy
        b ask w 5                   -> b hears nothing: Busy
        w writable yes              -> w asked 1:1, w asked 2:2, w asked 3:3, w asked 4:4
        a ask w 5                   -> a hears nothing: Busy
        w reply 3 yes               -> b hears yes
        a ask w 5                   -> w asked 5:5
        b lost                      ->
        a ask w 6                   -> w asked 6:6
        a ask w 7                   -> a hears nothing: Busy
        ",
    );
    // One client may ask sixteen questions at a time, of any number of workers.
    let mut script = "a hello -> a welcome 0\n".to_owned();
    for worker in 0..5 {
        script += &format!("w{worker} hello -> w{worker} welcome 0\n");
        script += &format!("w{worker} report 1 0 asks ->\n");
    }
    for ask in 0..16 {
        let worker = ask / 4;
        script += &format!("a ask w{worker} q -> w{worker} asked {}:q\n", ask + 1);
    }
    script += "a ask w4 q -> a hears nothing: Busy\n";
    script += "b hello -> b welcome 0\n";
    script += "b ask w4 q -> w4 asked 17:q\n";
    check(&script);
}

/// Workers that do not read must not fill the broker's memory with questions.
#[test]
fn questions_that_wait_to_be_sent_are_bounded_in_bytes() {
    let mut script = String::new();
    for client in 0..2 {
        script += &format!("a{client} hello -> a{client} welcome 0\n");
    }
    for worker in 0..6 {
        script += &format!("w{worker} hello -> w{worker} welcome 0\n");
        script += &format!("w{worker} report 1 0 asks ->\n");
        script += &format!("w{worker} writable no ->\n");
    }
    // Each has somewhat more than 3 MiB: 21 of them fit into 64.
    for ask in 0..21 {
        script += &format!("a{} ask w{} MiB:3 ->\n", ask / 12, ask / 4);
    }
    script += "a1 ask w5 MiB:3 -> a1 hears nothing: Busy\n";
    script += "a0 lost ->\n";
    script += "a1 ask w5 MiB:3 ->\n";
    check(&script);
}
