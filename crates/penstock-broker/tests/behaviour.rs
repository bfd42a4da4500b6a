//! What a broker does, seen from its clients: scripts, each line with what it sends.

mod script;

use script::check;

#[test]
fn a_message_is_published_delivered_and_settled() {
    check(
        "
        a hello                             -> a welcome 0
        a publish one                       -> a confirm 1
        a watch one                         -> a sees one pending
        w hello                             -> w welcome 0
        w consume default 10                -> w deliver one
        w ack one; put one yes              -> a sees one Succeeded yes, w confirm 1
        a watch one                         -> a sees one Succeeded yes
        a info one                          -> a knows nothing
        a status                            -> a status default:0/0/0 w=0/0/0 clients 1 results 1 evicted 0
        ",
    );
}
