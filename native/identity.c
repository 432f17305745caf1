#include "identity.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "paths.h"

#define ACCOUNTS_MAX (1u << 20)

static struct __user_cap_data_struct own[2];

/* ---- the files ---- */

struct text {
    char *data;
    size_t size;
};

/* Nearly every file fits here, which spares each request an allocation; one text at a time is in use. */
static char usual[8 << 10];

static void forget_text(struct text *text) {
    if (text->data != usual)
        free(text->data);
}

static int read_text(const char *path, struct text *out) {
    struct stat st;
    int fd = open_regular(path, O_RDONLY, 0, &st);
    if (fd < 0)
        return errno;
    if (st.st_size > (off_t)ACCOUNTS_MAX) {
        close(fd);
        return EFBIG;
    }
    size_t cap = (size_t)st.st_size;
    out->data = cap <= sizeof usual ? usual : malloc(cap);
    ssize_t n = 1;
    for (out->size = 0; out->data && out->size < cap && n > 0; out->size += n > 0 ? (size_t)n : 0)
        n = read(fd, out->data + out->size, cap - out->size);
    int error = n < 0 ? errno : 0;
    close(fd);
    return out->data ? error : ENOMEM;
}

/* The guest's own want, not what the sandbox did to the file. */
static bool is_ours(int error) {
    return error == ENOMEM || error == EMFILE || error == ENFILE;
}

/* A file that cannot be read counts as empty, so that numbers go on working; a name that would be in it gets the reason. */
static int read_accounts(const char *path, struct text *out, int *why) {
    *why = read_text(path, out);
    if (*why)
        out->size = 0;
    return is_ours(*why) ? *why : 0;
}

static int find_user(const char *user, struct account *account) {
    struct text passwd = {0};
    int why, error = read_accounts("/etc/passwd", &passwd, &why);
    if (!error && !passwd_find(passwd.data ? passwd.data : "", passwd.size, user, account))
        error = why && why != ENOTDIR ? why : ENOENT;
    forget_text(&passwd);
    return error;
}

static int find_groups(const char *group, struct account *account) {
    struct text text = {0};
    int why, error = read_accounts("/etc/group", &text, &why);
    const char *data = text.data ? text.data : "";
    if (!error && group && !group_find(data, text.size, group, &account->who.gid))
        error = why && why != ENOTDIR ? why : ENOENT;
    if (!error && !group && account->name[0] && !groups_of(data, text.size, account->name, &account->who))
        error = ENOMEM;
    forget_text(&text);
    return error;
}

int account_find(const char *user, struct account *account) {
    char name[ACCOUNT_NAME];
    const char *colon = strchr(user, ':');
    size_t size = colon ? (size_t)(colon - user) : strlen(user);
    memset(account, 0, sizeof *account);
    if (size >= sizeof name || (colon && !colon[1]))
        return ENOENT;
    memcpy(name, user, size);
    name[size] = 0;
    int error = find_user(size ? name : "0", account);
    if (!error)
        error = find_groups(colon ? colon + 1 : NULL, account);
    if (error)
        identity_release(&account->who);
    return error;
}

/* ---- the switch ---- */

static int set_capabilities(const struct __user_cap_data_struct data[2]) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    return syscall(SYS_capset, &head, data) ? errno : 0;
}

void identity_init(void) {
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    syscall(SYS_capget, &head, own);
    for (int i = 0; i < 2; i++)
        own[i].effective = own[i].permitted;
    set_capabilities(own);
    syscall(SYS_setgroups, 0, NULL);
}

int identity_enter(const struct identity *who) {
    struct __user_cap_data_struct none[2] = {{0, own[0].permitted, own[0].inheritable}, {0, own[1].permitted, own[1].inheritable}};
    if (syscall(SYS_setgroups, who->count, who->groups))
        return errno;
    syscall(SYS_setfsgid, who->gid);
    syscall(SYS_setfsuid, who->uid);
    bool switched = syscall(SYS_setfsuid, -1) == who->uid && syscall(SYS_setfsgid, -1) == who->gid;
    int error = switched ? set_capabilities(who->uid == 0 ? own : none) : EINVAL;
    if (error)
        identity_leave();
    return error;
}

/* The guest's own kuid has no number in the sandbox, so setfsuid cannot name it: setreuid(-1, -1) sets the file system uid
 * to the effective one, which never changed. */
void identity_leave(void) {
    set_capabilities(own);
    syscall(SYS_setreuid, -1, -1);
    syscall(SYS_setregid, -1, -1);
    syscall(SYS_setgroups, 0, NULL);
}

int identity_become(const struct identity *who) {
    const struct __user_cap_data_struct none[2] = {0};
    struct __user_cap_data_struct root[2] = {{own[0].permitted, own[0].permitted, 0}, {own[1].permitted, own[1].permitted, 0}};
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    if (syscall(SYS_setgroups, who->count, who->groups) || syscall(SYS_setresgid, who->gid, who->gid, who->gid) ||
        syscall(SYS_setresuid, who->uid, who->uid, who->uid))
        return errno;
    /* From one ordinary uid to another the kernel drops nothing by itself. */
    return set_capabilities(who->uid == 0 ? root : none);
}
