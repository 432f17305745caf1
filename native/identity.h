/* Who a request acts as: names from the sandbox's own /etc/passwd and /etc/group, and the switch to and from a user's
 * file identity. Those files are hostile: regular, at most 1 MiB, opened without following magic links. */
#ifndef BARCHAN_IDENTITY_H
#define BARCHAN_IDENTITY_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ACCOUNT_NAME 256
#define ACCOUNT_HOME 1024
#define MAX_GROUPS 1024u

struct identity {
    uint32_t uid, gid, count;
    uint32_t *groups; /* malloc'ed */
};

struct account {
    struct identity who;
    char name[ACCOUNT_NAME]; /* empty: no entry */
    char home[ACCOUNT_HOME];
};

/* `user` as in a request. 0, or an errno: ENOENT for an unknown name. On success account->who is to be released. */
int account_find(const char *user, struct account *account);
void identity_release(struct identity *who);

/* accounts.c, pure: what account_find does with the text of the files. */
bool passwd_find(const char *data, size_t size, const char *user, struct account *account);
bool group_find(const char *data, size_t size, const char *name, uint32_t *gid);
/* The first MAX_GROUPS groups; false without memory. */
bool groups_of(const char *data, size_t size, const char *name, struct identity *who);

/* Remembers the guest's own capabilities; once, at start. */
void identity_init(void);
/* File system identity of `who` until identity_leave; 0 or an errno. Root keeps the guest's capabilities, anybody else none. */
int identity_enter(const struct identity *who);
void identity_leave(void);
/* In a child, for good; 0 or an errno. */
int identity_become(const struct identity *who);
#endif
