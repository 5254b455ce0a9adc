/* tools/cmd_host.h - a command in the daemon: its store, its sessions, its limits.
 *
 * Responsible for: what stands behind cmd_open_store and cmd_open_service there: leases on the
 * sessions that are named, who is the scheduler thread when, wishes of whoever asked.
 * Not responsible for: the socket (control.h), the commands.
 *
 * Threads: the command's.
 * Units: none.
 */
#ifndef TOOLS_CMD_HOST_H
#define TOOLS_CMD_HOST_H

#include "tools/cmd.h"

/* BUSY, naming what is not done while a daemon holds the store and what to do instead. */
enum kv_err cmd_host_check(const struct cmd *cmd, const struct cmd_entry *entry,
                           struct kv_diag *diag);
enum kv_err cmd_host_open_store(struct cmd *cmd, struct store **store_out, struct kv_diag *diag);
enum kv_err cmd_host_open_service(struct cmd *cmd, struct service **service_out,
                                  struct kv_diag *diag);
/* The lease of cmd->session_name. */
enum kv_err cmd_host_take_session(struct cmd *cmd, struct kv_diag *diag);
/* Under that lease, of a session that is awake: what is stored of it is woken beside it under
 * another name, proven, and dropped. */
enum kv_err cmd_host_prove(struct cmd *cmd, struct receipt *receipt_out, struct kv_diag *diag);
void cmd_host_close(struct cmd *cmd);
/* Takes what whoever asked has said meanwhile. */
void cmd_host_listen(struct cmd *cmd);

#endif
